"""Encoders of raw sounds (Wav2Vec2, HuBERT, WavLM): frames by convolutions, masks by lengths, heads that read one layer or all."""

import numpy as np
import onnxruntime
import pytest
import torch
from transformers import Wav2Vec2FeatureExtractor

from hydra_transformers import AutoHydra, load_data
from hydra_transformers.data.batches import batches, collate
from hydra_transformers.export import export, inputs_of
from tests.families import HUBERT, WAV2VEC2, WAVLM, for_families, padded_sounds


EVERY = for_families([WAV2VEC2, HUBERT, WAVLM])
MASKED = {"feat_extract_norm": "layer"}  # of models whose extractor makes masks


@pytest.mark.slow
@torch.no_grad()
@EVERY
@pytest.mark.parametrize("stable", [False, True], ids=["norms last", "norms first"])
@pytest.mark.parametrize("weighted", [False, True], ids=["last layer", "all layers"])
def test_a_dense_hydra_is_the_backbone(family, stable, weighted):
    backbone = family.backbone(**MASKED, do_stable_layer_norm=stable, use_weighted_layer_sum=weighted)
    hydra = AutoHydra.from_backbone(backbone)
    sounds = padded_sounds()
    for backend in ("eager", "sdpa"):
        backbone.set_attn_implementation(backend)
        hydra.set_attn_implementation(backend)
        for inputs in (sounds, {"input_values": sounds["input_values"]}):
            expected, found = (model(**inputs, output_hidden_states=True) for model in (backbone, hydra))
            torch.testing.assert_close(found.member_logits[:, 0], expected.logits, atol=1e-12, rtol=1e-10)
            for mine, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(mine[:, 0], theirs, atol=1e-12, rtol=1e-10)
            assert hydra(**inputs).hidden_states is None
            theirs = backbone.base_model(**inputs).last_hidden_state
            mine = hydra.base_model(**inputs).last_hidden_state
            torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
@torch.no_grad()
@EVERY
def test_a_sound_answers_alike_alone_and_beside_longer_ones(family):
    hydra = AutoHydra.from_backbone(family.backbone(**MASKED))
    sounds = padded_sounds()
    together = hydra(**sounds).member_logits
    for row, length in enumerate(sounds["attention_mask"].sum(dim=1).tolist()):
        alone = hydra(input_values=sounds["input_values"][row : row + 1, :length]).member_logits
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-12, rtol=1e-10)


@pytest.mark.slow
def test_a_dropped_layer_changes_nothing():
    members = [
        AutoHydra.from_backbone(WAV2VEC2.backbone(seed, layerdrop=1.0, hidden_dropout=0.0)) for seed in range(2)
    ]
    hydra = AutoHydra.from_pruned_members(members).train()
    states = hydra.base_model(**padded_sounds(), output_hidden_states=True).hidden_states
    assert all(torch.equal(each, states[0]) for each in states[1:])


@pytest.mark.slow
def test_frozen_convolutions_get_no_gradient():
    for hydra in (WAV2VEC2.fused(), WAV2VEC2.fused(shared=())):
        hydra.freeze_feature_encoder()
        hydra(**padded_sounds(), labels=torch.zeros(4, dtype=torch.long)).loss.backward()
        frozen = {name for name, each in hydra.named_parameters() if not each.requires_grad}
        assert frozen and frozen == {name for name, _ in hydra.named_parameters() if ".feature_extractor." in name}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [
        (
            {"input_values": torch.zeros(2, 10, 7)},
            r"shape \(2, 10, 7\): pass sounds of equal length, \(batch, samples\)",
        ),
        ({"input_values": torch.zeros(2, 5)}, "input_values has 5 samples, too few for a single frame"),
        ({"input_values": torch.zeros(1, 40), "attention_mask": torch.ones(1, 1, 6, 6)}, "pass a mask of the samples"),
    ],
    ids=["spectrograms", "short", "mask of frames"],
)
def test_what_is_no_sound_is_refused(inputs, sentence):
    hydra = AutoHydra.from_backbone(WAV2VEC2.backbone())
    with pytest.raises(ValueError, match=sentence):
        hydra(**inputs)


@pytest.mark.slow
def test_adapters_are_refused():
    backbone = WAV2VEC2.backbone(do_stable_layer_norm=True, adapter_attn_dim=4)
    with pytest.raises(Exception, match="adapter_attn_dim is 4: a Hydra has no such part, set it to None"):
        AutoHydra.from_backbone(backbone)


def extractor(**settings) -> Wav2Vec2FeatureExtractor:
    return Wav2Vec2FeatureExtractor(return_attention_mask=True, **settings)


def waves() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.standard_normal(length).astype(np.float32) for length in (40, 31, 25, 36, 40)]


@pytest.mark.slow
def test_sounds_of_all_lengths_are_loaded_padded_and_answered():
    """By `load_data`, by `predict` and by the pipeline, in batches, as one by one by Transformers."""
    backbone = HUBERT.backbone().float()
    hydra = AutoHydra.from_backbone(backbone)
    with torch.no_grad():
        expected = torch.cat(
            [backbone(**extractor()(wave, sampling_rate=16_000, return_tensors="pt")).logits for wave in waves()]
        ).softmax(dim=-1)
    rows = [{"audio": {"array": wave, "sampling_rate": 16_000}, "label": 0} for wave in waves()]
    data = load_data(rows, extractor())
    with torch.no_grad():
        logits = [hydra(**batch).logits for batch in batches(data, batch_size=3)]
    torch.testing.assert_close(torch.cat(logits).softmax(dim=-1), expected, atol=1e-5, rtol=1e-4)
    answers = hydra.predict(waves(), extractor(), batch_size=2)
    for answer, probabilities in zip(answers, expected, strict=True):
        assert answer["score"] == pytest.approx(probabilities.max().item(), abs=1e-5)


@pytest.mark.parametrize("masks", [False, True])
def test_exports_have_a_mask_of_the_samples_where_the_feature_extractor_makes_one(masks):
    found = inputs_of(WAV2VEC2.fused(), Wav2Vec2FeatureExtractor(return_attention_mask=masks), 2, 0.5)
    assert set(found) == {"input_values", *(["attention_mask"] if masks else [])}
    assert len({tensor.shape for tensor in found.values()}) == 1


@pytest.mark.slow
def test_exported_models_take_sounds_of_any_length_with_their_masks(tmp_path):
    hydra = HUBERT.fused().float()
    folder = export(hydra, tmp_path / "exported", "onnx", extractor())
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    for samples in (40, 33):
        inputs = {"input_values": torch.randn(3, samples), "attention_mask": torch.ones(3, samples, dtype=torch.long)}
        inputs["attention_mask"][1, 20:] = 0
        [logits] = session.run(["logits"], {name: tensor.numpy() for name, tensor in inputs.items()})
        with torch.no_grad():
            torch.testing.assert_close(torch.tensor(logits), hydra(**inputs).logits, atol=1e-5, rtol=1e-4)


def test_rows_of_raw_sounds_are_filled_up_with_zeros():
    rows = [
        {"input_values": torch.ones(length), "attention_mask": torch.ones(length), "labels": 1} for length in (3, 5)
    ]
    batch = collate(rows)
    assert batch["input_values"].tolist() == batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    without = collate([{"input_values": row["input_values"]} for row in rows])
    assert set(without) == {"input_values"}


def test_batches_of_raw_sounds_are_no_rows_of_spectrograms():
    sounds, labels = torch.zeros(2, 6), torch.zeros(2, dtype=torch.long)
    for batch in ({"input_values": sounds, "labels": labels}, {"input_values": sounds, "attention_mask": sounds}):
        [found] = batches([batch])
        assert found["input_values"].shape == (2, 6)
    [spectrograms] = batches([{"input_values": torch.zeros(6, 4), "labels": 1}] * 3)
    assert spectrograms["input_values"].shape == (3, 6, 4)
    [rows] = batches([{"input_values": torch.zeros(6)}] * 3)
    assert rows["input_values"].shape == (3, 6)
