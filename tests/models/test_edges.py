"""Corners of real use: odd configs, masks, dropout for sampling, towers alone, replicas, offloaded weights."""

import pytest
import torch
from transformers import AutoModel, CLIPTextModel, CLIPVisionModel

from hydra_transformers import HydraCLIPTextModel, HydraCLIPVisionModel, HydraViTConfig
from tests.families import (
    BERT,
    CLIP,
    VIT,
    bert_backbone,
    clip_backbone,
    images,
    padded_texts,
)


def fused(family, **fields):
    """Three members that keep all heads."""
    return family.hydra.from_pruned_members([family.backbone(seed, **fields) for seed in range(3)])


@torch.no_grad()
def test_a_mask_that_broadcasts_over_the_batch():
    texts, hydra = padded_texts(), fused(BERT)
    mask = torch.ones(1, 1, 7, 7, dtype=torch.bool)
    mask[..., 5:] = False
    one_each = hydra(input_ids=texts["input_ids"], attention_mask=mask.expand(4, 1, 7, 7)).member_logits
    broadcast = hydra(input_ids=texts["input_ids"], attention_mask=mask).member_logits
    torch.testing.assert_close(broadcast, one_each)
    with pytest.raises(ValueError, match="attention_mask has 4 heads: members have other heads each"):
        hydra(input_ids=texts["input_ids"], attention_mask=mask.expand(4, 4, 7, 7))


@torch.no_grad()
@pytest.mark.parametrize("where", ["output_dropout", "mlp_dropout", "attention"])
def test_single_dropouts_can_be_switched_on_to_sample(where):
    hydra = fused(BERT, hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5)
    texts = padded_texts()
    assert torch.equal(hydra(**texts).member_logits, hydra(**texts).member_logits)
    for layer in hydra.bert.layers:
        layer.get_submodule(where).train()
    assert not torch.equal(hydra(**texts).member_logits, hydra(**texts).member_logits)


@torch.no_grad()
def test_replicas_of_data_parallel_run():
    """What `nn.DataParallel` makes on several GPUs: copies of the modules with parameters as plain attributes."""
    hydra, inputs = fused(CLIP), CLIP.inputs()
    expected = hydra(**inputs).member_logits
    copies = {module: module._replicate_for_data_parallel() for module in hydra.modules()}
    for module, copy in copies.items():
        for name, parameter in module._parameters.items():
            copy._parameters.pop(name, None)
            setattr(copy, name, None if parameter is None else parameter.detach())
        for name, child in module._modules.items():
            copy._modules[name] = None if child is None else copies[child]
    torch.testing.assert_close(copies[hydra](**inputs).member_logits, expected)


def test_word_embeddings_of_their_own_are_not_resized_in_the_fused_model():
    own = BERT.hydra.from_pruned_members([bert_backbone(seed) for seed in range(2)], shared=())
    with pytest.raises(ValueError, match="each member has word embeddings of its own"):
        own.resize_token_embeddings(50)
    shared = fused(BERT)
    shared.resize_token_embeddings(50)
    assert shared.get_input_embeddings().weight.shape[0] == 50


@pytest.mark.slow
@torch.no_grad()
def test_clip_towers_stand_alone(tmp_path):
    hydra = CLIP.fused()
    hydra.save_pretrained(tmp_path / "clip")
    inputs = CLIP.inputs()
    texts = {"input_ids": inputs["input_ids"], "attention_mask": inputs["attention_mask"]}
    for name, tower_class, arguments in (
        ("text", HydraCLIPTextModel, texts),
        ("vision", HydraCLIPVisionModel, {"pixel_values": inputs["pixel_values"]}),
    ):
        expected = getattr(hydra, f"{name}_model")(**arguments).pooler_output
        from_whole = tower_class.from_pretrained(tmp_path / "clip")
        torch.testing.assert_close(from_whole(**arguments).pooler_output, expected)
        from_whole.save_pretrained(tmp_path / name)
        again = AutoModel.from_pretrained(tmp_path / name)
        assert type(again) is tower_class
        torch.testing.assert_close(again(**arguments).pooler_output, expected)


@torch.no_grad()
def test_clip_towers_come_from_clip_towers():
    whole = clip_backbone()
    vision, text = whole.vision_model, whole.text_model
    assert isinstance(vision, CLIPVisionModel) and isinstance(text, CLIPTextModel)
    member = HydraCLIPVisionModel.from_backbone(vision, {0: [1]})
    assert member.config.kept_heads[0] == [[0, 2, 3]]
    dense = HydraCLIPVisionModel.from_backbone(vision)
    torch.testing.assert_close(dense(images()).pooler_output, vision(images()).pooler_output, atol=1e-12, rtol=1e-10)
    texts = padded_texts(3)
    torch.testing.assert_close(
        HydraCLIPTextModel.from_backbone(text)(**texts).pooler_output,
        text(**texts).pooler_output,
        atol=1e-12,
        rtol=1e-10,
    )
    with pytest.raises(ValueError, match=r"CLIPModel \(clip\): HydraCLIPVisionModel is built from clip_vision_model"):
        HydraCLIPVisionModel.from_backbone(whole)


def test_what_a_hydra_has_no_part_for_is_refused():
    with pytest.raises(ValueError, match="bool_masked_pos is for masked image modelling"):
        VIT.members()[0].vit(images(), bool_masked_pos=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="num_hidden_layers is 0"):
        HydraViTConfig(num_hidden_layers=0)
