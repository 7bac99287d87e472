"""LayoutLMv3: words, their boxes, and the image of the page in one encoder."""

import pytest
import torch
from transformers import LayoutLMv3Config, LayoutLMv3ForTokenClassification

from hydra_transformers import AutoHydra, HydraLayoutLMv3ForSequenceClassification, HydraLayoutLMv3Model
from hydra_transformers.export import export
from hydra_transformers.fusion import to_transformers
from hydra_transformers.pruning.ablation import ablation_of
from tests.families import LAYOUTLMV3, boxes, images, keep_first_layers, padded_texts, randomise


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama

PRUNED = {0: [1], 1: [0, 2, 3]}
CONFIGS = {
    "all": {},
    "no boxes": {"has_spatial_attention_bias": False},
    "no order": {"has_relative_attention_bias": False},
    "no bias": {"has_relative_attention_bias": False, "has_spatial_attention_bias": False},
    "no image": {"visual_embed": False},
}


def documents() -> dict[str, torch.Tensor]:
    return LAYOUTLMV3.inputs() | {"pixel_values": images()}


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_layoutlmv3_is_itself(name):
    if name == "no order":  # whose tables for the page nothing reads
        with pytest.raises(ValueError, match="rel_pos_x_bias"):
            AutoHydra.from_backbone(LAYOUTLMV3.backbone(**CONFIGS[name]))
        return
    backbone = LAYOUTLMV3.backbone(**CONFIGS[name])
    hydra, pruned = (HydraLayoutLMv3ForSequenceClassification.from_backbone(backbone, heads) for heads in ({}, PRUNED))
    ablated = LAYOUTLMV3.ablate(backbone, PRUNED)
    left = {key: value.flip(1) for key, value in LAYOUTLMV3.inputs().items()}
    kinds = [LAYOUTLMV3.inputs(), left, {"input_ids": padded_texts()["input_ids"]}]
    kinds += [] if name == "no image" else [documents(), left | {"pixel_values": images()}]
    for implementation in ("eager", "sdpa"):
        for model in (hydra, pruned):
            model.set_attn_implementation(implementation)
        for inputs in kinds:
            expected, found = (model(**inputs, output_hidden_states=True) for model in (backbone, hydra))
            torch.testing.assert_close(found.member_logits[:, 0], expected.logits, atol=1e-10, rtol=0)
            for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
                torch.testing.assert_close(ours[:, 0], theirs, atol=1e-10, rtol=0)
            torch.testing.assert_close(
                pruned(**inputs).member_logits[:, 0], ablated(**inputs).logits, atol=1e-10, rtol=0
            )


@torch.no_grad()
@pytest.mark.parametrize("shared", [(), ("embeddings", "layernorm", "mlp")])
def test_fused_documents_are_the_mean_of_the_members(shared):
    backbones = [LAYOUTLMV3.backbone(seed if not shared else 0) for seed in range(3)]
    prunings = LAYOUTLMV3.heads_to_prune
    members = [LAYOUTLMV3.hydra.from_backbone(*each) for each in zip(backbones, prunings, strict=True)]
    hydra = LAYOUTLMV3.hydra.from_pruned_members(members, shared=shared)
    references = [LAYOUTLMV3.ablate(*each) for each in zip(backbones, prunings, strict=True)]
    expected = torch.stack([model(**documents()).logits.softmax(-1) for model in references]).mean(0)
    torch.testing.assert_close(hydra(**documents()).logits.softmax(-1), expected, atol=1e-10, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("labels", [5, 12])  # with one map, and with two
def test_words_of_documents_are_classified(labels):
    fields = LAYOUTLMV3.backbone().config.to_dict() | {"num_labels": labels}
    for name in ("id2label", "label2id"):
        fields.pop(name, None)
    backbone = randomise(LayoutLMv3ForTokenClassification(LayoutLMv3Config(**fields)).double(), 0)
    hydra = AutoHydra.from_backbone(backbone)
    for inputs in (LAYOUTLMV3.inputs(), documents()):
        expected = backbone(**inputs).logits
        assert expected.shape == (4, 7, labels)
        torch.testing.assert_close(hydra(**inputs).member_logits[:, 0], expected, atol=1e-10, rtol=0)
    plain = to_transformers(hydra)
    torch.testing.assert_close(plain(**documents()).logits, expected, atol=1e-10, rtol=0)


@torch.no_grad()
def test_each_document_keeps_its_own_distances_when_heads_are_turned_off():
    backbone = LAYOUTLMV3.backbone()
    engine = ablation_of(LAYOUTLMV3.hydra.from_backbone(backbone))
    candidates = [(0, 1), (0, 3), (1, 0)]
    *parts, _ = engine.over(candidates)(documents())
    for (layer, head), logits in zip(candidates, torch.cat(parts), strict=True):
        expected = LAYOUTLMV3.ablate(backbone, {layer: [head]})(**documents()).logits
        torch.testing.assert_close(logits, expected, atol=1e-10, rtol=0)


def test_encoders_show_words_and_patches():
    backbone = LAYOUTLMV3.backbone()
    outputs = HydraLayoutLMv3Model.from_backbone(backbone)(**documents())
    expected = backbone.layoutlmv3(**documents()).last_hidden_state
    assert outputs.last_hidden_state.shape[1] == 7 + 1 + 4
    torch.testing.assert_close(outputs.last_hidden_state, expected, atol=1e-10, rtol=0)


@pytest.mark.slow
def test_exported_documents_answer_as_the_model_does(tmp_path):
    hydra = LAYOUTLMV3.fused().float()
    keep_first_layers(hydra)
    export(hydra, tmp_path / "exported", "onnx")  # compares, and refuses what differs


def test_what_does_not_work_is_refused():
    hydra = LAYOUTLMV3.fused()
    with pytest.raises(TypeError, match="reads documents, words with their boxes and an image"):
        hydra.predict(["A text."])
    with pytest.raises(ValueError, match="input_ids is missing"):
        hydra(pixel_values=images(), bbox=boxes())
    with pytest.raises(ValueError, match="text_embed is False"):
        HydraLayoutLMv3Model.config_class(text_embed=False)
