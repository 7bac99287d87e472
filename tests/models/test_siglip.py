"""SigLIP's two towers, their pooling heads and their pairs, and image classifiers that are one tower of two."""

import pytest
import torch
from transformers import SiglipVisionModel

from hydra_transformers import AutoHydra, HydraSiglipTextModel, HydraSiglipVisionModel
from hydra_transformers.model_info import ModelInfo
from hydra_transformers.models.auto import auto_class_of, class_with_head
from hydra_transformers.pruning import prune_heads
from tests.families import (
    CLIP,
    CLIP_CLASSIFIER,
    RAGGED,
    SIGLIP,
    SIGLIP_CLASSIFIER,
    each_of,
    images,
    padded_texts,
    randomise,
)


CLASSIFIERS = each_of([CLIP_CLASSIFIER, SIGLIP_CLASSIFIER])


def pairs(count: int = 3) -> dict[str, torch.Tensor]:
    return {"pixel_values": images(count), **padded_texts(count)}


def assert_same(found, expected) -> None:
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-10)


# Towers


@torch.no_grad()
def test_towers_give_the_states_and_the_pooled_output_of_the_backbone():
    backbone = SIGLIP.backbone()
    inputs = SIGLIP.inputs()
    texts = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    for tower, hydra, given in (
        (backbone.vision_model, HydraSiglipVisionModel, {"pixel_values": inputs["pixel_values"]}),
        (backbone.text_model, HydraSiglipTextModel, texts),
    ):
        found = AutoHydra.from_backbone(tower)
        expected = tower(**given, output_hidden_states=True)
        assert type(found) is hydra
        outputs = found(**given, output_hidden_states=True)
        assert_same(outputs.last_hidden_state, expected.last_hidden_state)
        assert_same(outputs.pooler_output, expected.pooler_output)
        for ours, theirs in zip(outputs.hidden_states, expected.hidden_states, strict=True):
            assert_same(ours[:, 0], theirs)


@torch.no_grad()
def test_features_are_those_of_the_backbone_also_of_larger_images():
    backbone = SIGLIP.backbone()
    inputs = SIGLIP.inputs()
    hydra = AutoHydra.from_backbone(backbone)
    large = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for given in ({"pixel_values": inputs["pixel_values"]}, {"pixel_values": large, "interpolate_pos_encoding": True}):
        found, expected = (model.get_image_features(**given).pooler_output for model in (hydra, backbone))
        assert_same(found, expected)


@torch.no_grad()
def test_a_tower_without_a_pooling_head_pools_nothing():
    config = SIGLIP.backbone().config.vision_config
    config.vision_use_head = False
    tower = randomise(SiglipVisionModel(config).double(), 0)
    hydra = AutoHydra.from_backbone(tower)
    outputs = hydra(images())
    assert outputs.pooler_output is None and "head" not in dict(hydra.named_children())
    assert_same(outputs.last_hidden_state, tower(images()).last_hidden_state)


# Pairs


@torch.no_grad()
def test_the_probability_of_a_pair_is_the_mean_of_the_members_whatever_else_is_in_the_call():
    hydra = SIGLIP.fused()
    inputs = SIGLIP.inputs()
    outputs = hydra(**inputs)
    assert torch.equal(outputs.logits_per_text, outputs.logits_per_image.t())
    assert_same(outputs.logits_per_image.sigmoid(), outputs.member_logits.sigmoid().mean(dim=1))
    alone = hydra(**{name: value[:1] for name, value in inputs.items()})
    assert_same(alone.logits_per_image, outputs.logits_per_image[:1, :1])
    assert_same(outputs.similarity, outputs.member_logits.mean(dim=1))


def test_the_loss_is_the_mean_of_the_members_own_or_that_of_the_ensemble():
    backbones = [SIGLIP.backbone(seed) for seed in range(2)]
    hydra = SIGLIP.hydra.from_pruned_members(backbones, shared=())
    expected = torch.stack([each(**pairs(), return_loss=True).loss for each in backbones]).mean()
    assert_same(hydra(**pairs(), return_loss=True).loss, expected)

    hydra.config.ensemble_loss = "ensemble"
    outputs = hydra(**pairs(), return_loss=True)
    probability = outputs.member_logits.sigmoid().mean(dim=1)
    is_pair = torch.eye(3, dtype=torch.bool)
    assert_same(outputs.loss, -torch.where(is_pair, probability, 1 - probability).log().sum(dim=-1).mean())

    with pytest.raises(ValueError, match="return_loss got 4 images and 3 texts: pass them in pairs"):
        hydra(**SIGLIP.inputs(), return_loss=True)


# Classifiers that are one of two towers


@CLASSIFIERS
@torch.no_grad()
def test_a_classifier_of_one_tower_is_the_backbones_and_has_the_config_of_that_tower(family):
    backbone = family.backbone()
    backbone.config.id2label = dict(enumerate(["a", "b", "c", "d", "e"]))
    hydra = prune_heads(backbone, RAGGED[0])
    expected = family.ablate(backbone, RAGGED[0])(**family.inputs()).logits
    assert_same(hydra(**family.inputs()).member_logits[:, 0], expected)
    assert not hasattr(hydra.config, "vision_config") and hydra.config.id2label[4] == "e"
    assert hydra.config.kept_heads[0] == [[0, 2, 3]]
    labels = torch.tensor([0, 1, 2, 3])
    assert_same(
        prune_heads(backbone)(**family.inputs(), labels=labels).loss, backbone(**family.inputs(), labels=labels).loss
    )


def test_a_classifier_leaves_out_the_pooling_head_that_it_does_not_read():
    backbone = SIGLIP_CLASSIFIER.backbone()
    hydra = SIGLIP_CLASSIFIER.fused()
    assert any(name.startswith("vision_model.head.") for name, _ in backbone.named_parameters())
    assert hydra.vision_model.head is None and hydra.config.vision_use_head is False
    mixed = SIGLIP_CLASSIFIER.hydra.from_pruned_members([backbone, hydra])
    assert mixed.num_members == 4


@pytest.mark.parametrize(("classifier", "towers"), [(CLIP_CLASSIFIER, CLIP), (SIGLIP_CLASSIFIER, SIGLIP)])
def test_a_config_tells_by_its_architecture_whether_it_is_of_two_towers_or_of_a_classifier(
    classifier, towers, tmp_path
):
    for family, auto_class in (
        (classifier, "AutoModelForImageClassification"),
        (towers, "AutoModelForZeroShotImageClassification"),
    ):
        backbone = family.backbone()
        backbone.save_pretrained(tmp_path)
        config = type(backbone.config).from_pretrained(tmp_path)
        assert class_with_head(config) is type(backbone) and auto_class_of(config) == auto_class
        assert ModelInfo.of(config).is_zero_shot is family.has_towers
        config.architectures = None
        assert ModelInfo.of(config).is_zero_shot  # as most of its kind


def test_towers_and_classifiers_do_not_stand_in_for_each_other():
    with pytest.raises(ValueError, match=r"SiglipModel\) has no parameter 'classifier.weight'.*for the same task"):
        SIGLIP_CLASSIFIER.hydra.from_backbone(SIGLIP.backbone())
    with pytest.raises(ValueError, match=r"CLIPForImageClassification\) has no parameter 'logit_scale'"):
        CLIP.hydra.from_backbone(CLIP_CLASSIFIER.backbone())
