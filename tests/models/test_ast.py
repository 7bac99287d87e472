"""AST: spectrograms in, whose patches overlap; a head with a LayerNorm of its own, which reads two tokens."""

import copy
import json

import numpy as np
import pytest
import torch
from transformers import ASTFeatureExtractor, AutoModelForAudioClassification, pipeline

from hydra_transformers import AutoHydra, HydraASTForAudioClassification, export
from hydra_transformers.models.modeling_hydra import PerMember
from tests.families import AST, keep_first_layers, spectrograms


NOISE = np.random.default_rng(0).standard_normal(1_600).astype(np.float32)
SOUNDS = [NOISE, {"array": 0.1 * NOISE[:800], "sampling_rate": 16_000}]


def extractor() -> ASTFeatureExtractor:
    return ASTFeatureExtractor(num_mel_bins=7, max_length=10)


@pytest.fixture
def saved(tmp_path):
    hydra = AST.fused().float()
    hydra.save_pretrained(tmp_path)
    extractor().save_pretrained(tmp_path)
    return hydra, tmp_path


@torch.no_grad()
def test_states_and_logits_are_those_of_ast():
    backbone = AST.backbone()
    expected = backbone(**AST.inputs(), output_hidden_states=True)
    hydra = HydraASTForAudioClassification.from_backbone(backbone)
    found = hydra(**AST.inputs(), output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected.logits.log_softmax(-1), atol=1e-10, rtol=0)
    for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
        torch.testing.assert_close(ours[:, 0], theirs, atol=1e-10, rtol=0)
    encoder, theirs = hydra.base_model(**AST.inputs()), backbone.base_model(**AST.inputs())
    torch.testing.assert_close(encoder.pooler_output, theirs.pooler_output, atol=1e-10, rtol=0)


@torch.no_grad()
def test_a_mask_is_that_of_ast():
    mask = torch.ones(4, AST.tokens, dtype=torch.long)
    mask[1:, 5:] = 0
    backbone = AST.backbone()
    expected = backbone(**AST.inputs(), attention_mask=mask).logits.log_softmax(-1)
    found = HydraASTForAudioClassification.from_backbone(backbone)(**AST.inputs(), attention_mask=mask).logits
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


def test_every_member_keeps_its_whole_head():
    head = AST.fused().classifier
    assert isinstance(head.layernorm, PerMember)
    for seed in range(3):
        theirs = AST.backbone(seed).classifier
        assert torch.equal(head.layernorm[seed].weight, theirs.layernorm.weight)
        assert torch.equal(head.layernorm[seed].bias, theirs.layernorm.bias)
        assert torch.equal(head.out_proj.weight[5 * seed : 5 * seed + 5], theirs.dense.weight)


@pytest.mark.parametrize(
    ("inputs", "sentence"),
    [({}, "input_values is missing"), ({"input_values": torch.zeros(10, 7)}, r"shape \(10, 7\): pass spectrograms")],
)
def test_other_inputs_are_refused(inputs, sentence):
    hydra = HydraASTForAudioClassification.from_backbone(AST.backbone())
    with pytest.raises(ValueError, match=sentence):
        hydra(**inputs)


@pytest.mark.slow
@torch.no_grad()
def test_exported_it_answers_batches_of_any_size(tmp_path):
    hydra = AST.fused().float()
    keep_first_layers(hydra)
    export(hydra, tmp_path / "exported", to="torch", processor=extractor())
    exported = torch.export.load(tmp_path / "exported" / "model.pt2").module()
    more = spectrograms(7, seed=1).float()
    torch.testing.assert_close(exported(input_values=more)["member_logits"], hydra(more).member_logits)


def test_the_pipeline_of_transformers_gives_the_mean_probability(saved):
    hydra, folder = saved
    classify = pipeline("audio-classification", model=str(folder), device="cpu")
    assert isinstance(classify.model, HydraASTForAudioClassification)
    found = {each["label"]: each["score"] for each in classify(NOISE.copy(), top_k=5)}
    inputs = extractor()(NOISE, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        expected = hydra(**inputs).member_logits.softmax(-1).mean(1)[0]
    scores = [found[f"LABEL_{index}"] for index in range(5)]
    assert scores == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_pipeline_that_says_how_sure_it_is_and_predict_answer_alike(saved):
    hydra, folder = saved
    assert "hydra-audio-classification" in json.loads((folder / "config.json").read_text())["custom_pipelines"]
    answer = pipeline("hydra-audio-classification", model=str(folder), device="cpu")
    first, second = answer([NOISE.copy(), copy.deepcopy(SOUNDS[1])])
    assert [first, second] == hydra.predict(SOUNDS, extractor()) == predict_loaded(folder)
    assert first["epistemic"] > 0 and len(first["scores"]) == 5 and first["label"] == first["scores"][0]["label"]
    assert len(answer(NOISE.copy(), top_k=2)["scores"]) == 2


def predict_loaded(folder) -> list[dict]:
    return AutoModelForAudioClassification.from_pretrained(folder).predict(SOUNDS)


def test_scores_of_several_labels_are_their_probabilities():
    members = [AST.backbone(seed, problem_type="multi_label_classification").float() for seed in range(2)]
    hydra = AutoHydra.from_pruned_members(members, shared=())
    [answer] = hydra.predict([NOISE], extractor(), top_k=None)
    inputs = extractor()(NOISE, sampling_rate=16_000, return_tensors="pt")
    with torch.no_grad():
        expected = hydra(**inputs).member_logits.sigmoid().mean(1)[0]
    found = {each["label"]: each["score"] for each in answer["scores"]}
    assert [found[f"LABEL_{index}"] for index in range(5)] == pytest.approx(expected.tolist(), abs=1e-5)
