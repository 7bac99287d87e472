"""Models of audio: spectrograms (AST, Whisper) and raw waveforms (Wav2Vec2, HuBERT, WavLM)."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import (
    ASTFeatureExtractor,
    AutoModelForAudioClassification,
    Wav2Vec2FeatureExtractor,
    WhisperFeatureExtractor,
    pipeline,
)

from hydra_transformers import AutoHydra, export, load_data
from hydra_transformers.data.batches import batches, collate
from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.ablation import ablation_of
from tests.families import AST, HUBERT, WAV2VEC2, WHISPER, keep_layers, log_mel, padded_sounds, spectrograms


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama

EXACT = {"atol": 1e-10, "rtol": 0}
NOISE = np.random.default_rng(0).standard_normal(16_000).astype(np.float32)
AUDIO = [NOISE[:1_600], {"array": 0.1 * NOISE[:800], "sampling_rate": 16_000}]
EXTRACTORS = {
    "ast": ASTFeatureExtractor(num_mel_bins=7, max_length=10),
    "whisper": WhisperFeatureExtractor(feature_size=7, chunk_length=1, hop_length=1_600),  # 10 frames
    "hubert": Wav2Vec2FeatureExtractor(return_attention_mask=True),
}


REFUSALS = [
    (
        AST,
        {"input_values": torch.zeros(1, 40, 7)},
        "40 frames of 7 mel bins, the model reads 10 of 7: give the feature",
    ),
    (AST, {"input_values": torch.zeros(1, 10, 13)}, "10 frames of 13 mel bins, the model reads 10 of 7"),
    (WHISPER, {"input_features": torch.zeros(2, 10, 7)}, r"\(2, 10, 7\), the model reads 7 mel bins of 10 frames"),
    (WHISPER, {"input_features": torch.zeros(2, 7, 8)}, r"\(2, 7, 8\), the model reads 7 mel bins of 10 frames"),
    (WAV2VEC2, {"input_values": torch.zeros(2, 5)}, "input_values has 5 samples, too few for one frame"),
    (
        WAV2VEC2,
        {"input_values": torch.zeros(1, 40), "attention_mask": torch.ones(1, 1, 6, 6)},
        r"pass one of \(batch, samples\)",
    ),
]


@pytest.mark.parametrize(("family", "inputs", "words"), REFUSALS, ids=[words for _, _, words in REFUSALS])
def test_other_inputs_are_refused(family, inputs, words):
    with pytest.raises(ValueError, match=words):
        family.hydra.from_backbone(family.backbone()).float()(**inputs)


def test_adapters_are_refused():
    backbone = WAV2VEC2.backbone(do_stable_layer_norm=True, adapter_attn_dim=4)
    with pytest.raises(Exception, match="adapter_attn_dim is 4: a Hydra has no such part, set it to None"):
        AutoHydra.from_backbone(backbone)


@pytest.mark.parametrize("family", [AST, WHISPER], ids=["ast", "whisper"])
def test_pipelines_and_predict_give_the_mean_probability(family, tmp_path):
    hydra = family.fused().float()
    extractor = EXTRACTORS[family.name]
    hydra.save_pretrained(tmp_path)
    extractor.save_pretrained(tmp_path)
    arrays = [AUDIO[0], AUDIO[1]["array"]]
    with torch.no_grad():
        outputs = hydra(**extractor(arrays, sampling_rate=16_000, return_tensors="pt"))
    expected = outputs.member_logits.softmax(-1).mean(1)
    for batch_size in (1, 2):
        found = pipeline("audio-classification", str(tmp_path), device="cpu")(
            copy.deepcopy(arrays), batch_size=batch_size, top_k=5
        )
        for row, probabilities in zip(found, expected, strict=True):
            scores = {each["label"]: each["score"] for each in row}
            found_row = [scores[f"LABEL_{index}"] for index in range(5)]
            assert found_row == pytest.approx(probabilities.tolist(), abs=1e-5)
    assert "hydra-audio-classification" in json.loads((tmp_path / "config.json").read_text())["custom_pipelines"]
    answers = pipeline("hydra-audio-classification", str(tmp_path), device="cpu")(copy.deepcopy(AUDIO))
    loaded = AutoModelForAudioClassification.from_pretrained(tmp_path)
    assert answers == hydra.predict(AUDIO, extractor) == loaded.predict(AUDIO)
    assert answers[0]["epistemic"] > 0 and answers[0]["label"] == answers[0]["scores"][0]["label"]
    assert [answer["score"] for answer in answers] == pytest.approx(expected.amax(-1).tolist(), abs=1e-5)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "more"), [(AST, spectrograms(7, seed=1)), (WHISPER, log_mel(7))], ids=["ast", "whisper"]
)
def test_an_export_takes_any_batch(family, more, tmp_path):
    hydra = family.fused().float()
    keep_layers(hydra, 2)
    export(hydra, tmp_path / "exported", to="torch", processor=EXTRACTORS[family.name])
    exported = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    inputs = {family.audio_name: more.float()}
    torch.testing.assert_close(exported(**inputs)["member_logits"], hydra(**inputs).member_logits)


# Spectrograms


@torch.no_grad()
def test_a_mask_is_that_of_ast():
    mask = torch.ones(4, AST.tokens, dtype=torch.long)
    mask[1:, 5:] = 0
    backbone = AST.backbone()
    expected = backbone(**AST.inputs(), attention_mask=mask).logits.log_softmax(-1)
    found = AST.hydra.from_backbone(backbone)(**AST.inputs(), attention_mask=mask).logits
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_frames_that_begin_no_patch_are_not_read():
    longer = torch.cat([spectrograms(), torch.ones(4, 2, 7, dtype=torch.float64)], dim=1)
    hydra = AST.fused()
    torch.testing.assert_close(hydra(input_values=longer).logits, hydra(input_values=spectrograms()).logits)


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


# Waveforms


def test_a_dropped_layer_changes_nothing():
    members = [AutoHydra.from_backbone(WAV2VEC2.backbone(seed, layerdrop=1.0, hidden_dropout=0)) for seed in (0, 1)]
    hydra = AutoHydra.from_pruned_members(members).train()
    states = hydra.base_model(**padded_sounds(), output_hidden_states=True).hidden_states
    assert all(torch.equal(each, states[0]) for each in states[1:])


def test_frozen_convolutions_get_no_gradient():
    for hydra in (WAV2VEC2.fused(), WAV2VEC2.fused(shared=())):
        hydra.freeze_feature_encoder()
        hydra(**padded_sounds(), labels=torch.zeros(4, dtype=torch.long)).loss.backward()
        frozen = {name for name, each in hydra.named_parameters() if not each.requires_grad}
        assert frozen and frozen == {name for name, _ in hydra.named_parameters() if ".feature_extractor." in name}


def waves() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(length).astype(np.float32) for length in (40, 31, 25, 36, 40)]


def test_sounds_of_all_lengths_are_loaded_padded_and_answered():
    """By `load_data`, by `predict` and by the pipeline, in batches, as one by one by Transformers."""
    backbone = HUBERT.backbone().float()
    hydra = AutoHydra.from_backbone(backbone)
    with torch.no_grad():
        expected = torch.cat(
            [
                backbone(**EXTRACTORS["hubert"](wave, sampling_rate=16_000, return_tensors="pt")).logits
                for wave in waves()
            ]
        ).softmax(dim=-1)
    rows = [{"audio": {"array": wave, "sampling_rate": 16_000}, "label": 0} for wave in waves()]
    data = load_data(rows, EXTRACTORS["hubert"])
    with torch.no_grad():
        logits = [hydra(**batch).logits for batch in batches(data, batch_size=3)]
    torch.testing.assert_close(torch.cat(logits).softmax(dim=-1), expected, atol=1e-5, rtol=1e-4)
    answers = hydra.predict(waves(), EXTRACTORS["hubert"], batch_size=2)
    for answer, probabilities in zip(answers, expected, strict=True):
        assert answer["score"] == pytest.approx(probabilities.max().item(), abs=1e-5)


def test_exported_models_take_sounds_of_any_length_with_their_masks(tmp_path):
    hydra = AutoHydra.from_backbone(HUBERT.backbone(num_hidden_layers=1).float())
    folder = export(hydra, tmp_path / "exported", "torch", EXTRACTORS["hubert"])
    exported = torch.export.load(folder / "model.pt2").module()
    for samples in (40, 33):
        inputs = {"input_values": torch.randn(3, samples), "attention_mask": torch.ones(3, samples, dtype=torch.long)}
        inputs["attention_mask"][1, 20:] = 0
        with torch.no_grad():
            torch.testing.assert_close(exported(**inputs)["logits"], hydra(**inputs).logits, atol=1e-5, rtol=1e-4)


def test_rows_of_raw_sounds_are_filled_up_with_zeros():
    rows = [{"input_values": torch.ones(size), "attention_mask": torch.ones(size), "labels": 1} for size in (3, 5)]
    batch = collate(rows)
    assert batch["input_values"].tolist() == batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    without = collate([{"input_values": row["input_values"]} for row in rows])
    assert set(without) == {"input_values"}


def test_batches_of_raw_sounds_are_no_rows_of_spectrograms():
    sounds = torch.zeros(2, 6)
    labels = torch.zeros(2, dtype=torch.long)
    for batch in ({"input_values": sounds, "labels": labels}, {"input_values": sounds, "attention_mask": sounds}):
        [found] = batches([batch])
        assert found["input_values"].shape == (2, 6)
    [spectrograms] = batches([{"input_values": torch.zeros(6, 4), "labels": 1}] * 3)
    assert spectrograms["input_values"].shape == (3, 6, 4)
    [rows] = batches([{"input_values": torch.zeros(6)}] * 3)
    assert rows["input_values"].shape == (3, 6)
