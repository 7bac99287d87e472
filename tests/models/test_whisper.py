"""Whisper's encoder: spectrograms of one length, positions that are not trained, heads that read one layer or all."""

import copy

import numpy as np
import pytest
import torch
from transformers import AutoModelForAudioClassification, WhisperFeatureExtractor, pipeline

from hydra_transformers import AutoHydra, HydraWhisperConfig, HydraWhisperModel, export
from hydra_transformers.cost import compare_costs, unpruned_backbone
from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.ablation import ablation_of
from hydra_transformers.training import PostPruningCallback
from hydra_transformers.training.parameter_groups import PARTS
from tests.families import WHISPER, log_mel


pytestmark = pytest.mark.slow  # the short run has four families, and this is another

EXACT = {"atol": 1e-10, "rtol": 0}
NOISE = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
SOUNDS = [NOISE, 0.1 * NOISE[:800]]


def extractor() -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=7, chunk_length=1, hop_length=1_600)  # 10 frames


@pytest.mark.parametrize("all_layers", [False, True], ids=["last layer", "all layers"])
@torch.no_grad()
def test_states_and_logits_are_those_of_whisper(all_layers):
    backbones = [WHISPER.backbone(seed, use_weighted_layer_sum=all_layers) for seed in range(2)]
    expected = backbones[0](**WHISPER.inputs(), output_hidden_states=True)
    found = AutoHydra.from_backbone(backbones[0])(**WHISPER.inputs(), output_hidden_states=True)
    torch.testing.assert_close(found.member_logits[:, 0], expected.logits, **EXACT)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, **EXACT)
    fused = AutoHydra.from_pruned_members(backbones, shared=())(**WHISPER.inputs()).member_logits
    apart = torch.stack([backbone(**WHISPER.inputs()).logits for backbone in backbones], dim=1)
    torch.testing.assert_close(fused, apart, **EXACT)


@pytest.mark.parametrize("all_layers", [False, True], ids=["last layer", "all layers"])
@torch.no_grad()
def test_heads_that_a_circuit_turns_off_are_as_good_as_gone(all_layers):
    hydra = AutoHydra.from_backbone(WHISPER.backbone(use_weighted_layer_sum=all_layers))
    engine = ablation_of(copy.deepcopy(hydra))
    *ablated, whole = torch.cat(list(engine.over(engine.heads)(WHISPER.inputs())))
    torch.testing.assert_close(whole, hydra(**WHISPER.inputs()).member_logits[:, 0], **EXACT)
    for (layer, head), found in zip(engine.heads, ablated, strict=True):
        expected = prune_heads(hydra, {layer: [head]})(**WHISPER.inputs()).member_logits[:, 0]
        torch.testing.assert_close(found, expected, **EXACT)


@torch.no_grad()
def test_the_encoder_is_built_from_a_classifier_and_from_an_encoder():
    backbone = WHISPER.backbone()
    expected = backbone.encoder(**WHISPER.inputs()).last_hidden_state
    for hydra in (HydraWhisperModel.from_backbone(backbone), AutoHydra.from_backbone(backbone.encoder)):
        torch.testing.assert_close(hydra(**WHISPER.inputs()).last_hidden_state, expected, **EXACT)
    mask = torch.ones(4, 10, dtype=torch.long)  # as some feature extractors make it, and Whisper does not read it
    torch.testing.assert_close(hydra(**WHISPER.inputs(), attention_mask=0 * mask).last_hidden_state, expected, **EXACT)


@pytest.mark.parametrize("backend", ["sdpa", "flex_attention"])
@torch.no_grad()
def test_every_backend_answers_as_eager_does(backend):
    hydra = WHISPER.fused().float()
    inputs = {"input_features": log_mel().float()}
    hydra.set_attn_implementation("eager")
    expected = hydra(**inputs).member_logits
    hydra.set_attn_implementation(backend)
    with torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(hydra(**inputs).member_logits, expected, atol=1e-5, rtol=0)


def test_positions_are_waves_and_stay():
    config = HydraWhisperConfig(d_model=8, encoder_attention_heads=2, encoder_layers=1, max_source_positions=3)
    positions = HydraWhisperModel(config).embeddings.embed_positions.weight
    times = torch.arange(3).unsqueeze(1) * 10_000 ** -(torch.arange(4) / 3)
    torch.testing.assert_close(positions.data, torch.cat([times.sin(), times.cos()], dim=1))
    assert not positions.requires_grad
    for model, count in ((WHISPER.fused(shared=(), heads="all"), 3), (WHISPER.backbone(), 1)):
        frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
        assert len(frozen) == count and all(name.endswith("embed_positions.weight") for name in frozen)
        model.requires_grad_(True)
        trains = PostPruningCallback(trainable=PARTS).trains(model)
        assert [name for name, is_trained in trains.items() if not is_trained] == frozen


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        ({}, "input_features is missing: pass the feature extractor's output"),
        ({"input_features": torch.zeros(2, 10, 7)}, r"\(2, 10, 7\), the model reads 7 mel bins of 10 frames"),
        ({"input_features": torch.zeros(2, 7, 8)}, r"\(2, 7, 8\), the model reads 7 mel bins of 10 frames"),
    ],
)
def test_other_inputs_are_refused(inputs, sentence):
    with pytest.raises(ValueError, match=sentence):
        AutoHydra.from_backbone(WHISPER.backbone())(**inputs)


def test_the_cost_is_that_of_the_layers():
    hydra = WHISPER.fused(shared=(), heads="all")
    costs = compare_costs({"hydra": hydra, "one": unpruned_backbone(hydra)})
    assert costs["hydra"].multiply_adds > 2.5 * costs["one"].multiply_adds > 0


@torch.no_grad()
def test_an_export_takes_any_batch(tmp_path):
    hydra = WHISPER.fused().float()
    export(hydra, tmp_path / "exported", to=["onnx", "torch"], processor=extractor())
    exported = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    more = log_mel(7).float()
    torch.testing.assert_close(exported(input_features=more)["member_logits"], hydra(more).member_logits)


def test_pipelines_read_sounds(tmp_path):
    hydra = WHISPER.fused().float()
    hydra.save_pretrained(tmp_path)
    extractor().save_pretrained(tmp_path)
    assert type(AutoModelForAudioClassification.from_pretrained(tmp_path)) is type(hydra)
    features = extractor()(SOUNDS, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        expected = hydra(**features).logits.softmax(-1).amax(-1).tolist()
    for task in ("audio-classification", "hydra-audio-classification"):
        for batch_size in (1, 2):
            found = pipeline(task, str(tmp_path))(SOUNDS, batch_size=batch_size)
            scores = [each["score"] if isinstance(each, dict) else each[0]["score"] for each in found]
            assert scores == pytest.approx(expected, abs=1e-5)
