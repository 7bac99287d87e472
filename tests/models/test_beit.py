"""BEiT's biases of positions: a table in each layer, or one for all, and keys without a bias."""

import pytest
import torch
from transformers.models.beit.modeling_beit import BeitRelativePositionBias

from hydra_transformers import HydraBeitForImageClassification, HydraBeitModel
from hydra_transformers.fusion import to_transformers
from hydra_transformers.models.modeling_hydra import PerMember
from hydra_transformers.models.modeling_hydra_beit import numbers_of_distances
from tests.families import BEIT, images


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama

PRUNED = {0: [1], 1: [0, 2, 3]}
OWN, SHARED = "use_relative_position_bias", "use_shared_relative_position_bias"
CONFIGS = {
    "own tables": {},
    "one table": {OWN: False, SHARED: True},
    "both": {SHARED: True},
    "absolute": {OWN: False, "use_absolute_position_embeddings": True},
    "first token": {"use_mean_pooling": False},
    "no scales": {"layer_scale_init_value": 0.0},
}


@torch.no_grad()
@pytest.mark.parametrize("name", CONFIGS)
def test_every_kind_of_beit_is_itself(name):
    backbone = BEIT.backbone(**CONFIGS[name])
    ablated = BEIT.ablate(backbone, PRUNED)
    hydra = HydraBeitForImageClassification.from_backbone(backbone)
    pruned = HydraBeitForImageClassification.from_backbone(backbone, PRUNED)
    for implementation in ("eager", "sdpa"):
        for model in (backbone, ablated, hydra, pruned):
            model.set_attn_implementation(implementation)
        expected, found = (model(images(), output_hidden_states=True) for model in (backbone, hydra))
        torch.testing.assert_close(found.member_logits[:, 0], expected.logits, atol=1e-10, rtol=0)
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(ours[:, 0], theirs, atol=1e-10, rtol=0)
        torch.testing.assert_close(pruned(images()).member_logits[:, 0], ablated(images()).logits, atol=1e-10, rtol=0)
    encoder = HydraBeitModel.from_backbone(backbone)
    outputs, expected = encoder(images()), backbone.beit(images())
    torch.testing.assert_close(outputs.last_hidden_state, expected.last_hidden_state, atol=1e-10, rtol=0)
    torch.testing.assert_close(outputs.pooler_output, expected.pooler_output, atol=1e-10, rtol=0)


@pytest.mark.parametrize("side", [1, 2, 14])
def test_distances_have_the_numbers_that_they_have_in_beit(side):
    expected = BeitRelativePositionBias.generate_relative_position_index((side, side))
    assert torch.equal(numbers_of_distances(side, expected.device), expected)


def test_a_head_takes_its_row_of_the_table_along():
    backbone = BEIT.backbone()
    member = HydraBeitForImageClassification.from_backbone(backbone, PRUNED)
    for layer, kept in ((0, [0, 2, 3]), (1, [1])):
        table = backbone.beit.layers[layer].relative_position_bias.relative_position_bias_table
        assert torch.equal(member.beit.layers[layer].attention.distance_bias.weight, table.t()[kept])


@torch.no_grad()
@pytest.mark.parametrize("fields", [{}, {OWN: False, SHARED: True}], ids=["own tables", "one table"])
def test_a_plain_beit_answers_as_its_member(fields):
    backbone = BEIT.backbone(**fields)
    member = HydraBeitForImageClassification.from_backbone(backbone, {layer: [layer] for layer in range(3)})
    for layer in member.beit.layers:  # as training moves it, without effect
        layer.attention.qkv_proj.bias[24:48] = 0.5
    expected = member(images()).member_logits[:, 0]
    if fields:  # the table has a column for each head
        with pytest.raises(ValueError, match="fill_up=True"):
            to_transformers(member)
    else:
        plain = to_transformers(member)
        assert plain.config.num_attention_heads == 3
        torch.testing.assert_close(plain(images()).logits, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(to_transformers(member, fill_up=True)(images()).logits, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("shared", "is_one"), [(("embeddings",), True), (("layernorm",), False)])
def test_one_table_for_all_layers_counts_as_embeddings(shared, is_one):
    backbones = [BEIT.backbone(seed, **{OWN: False, SHARED: True}) for seed in range(2)]
    table = BEIT.hydra.from_pruned_members(backbones, shared=shared).beit.relative_attention_bias
    assert isinstance(table, PerMember) is not is_one


def test_what_does_not_work_is_refused():
    hydra = BEIT.fused()
    with pytest.raises(ValueError, match=r"pixel_values are 12 x 8: .* pass images of size 8"):
        hydra(torch.zeros(1, 3, 12, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"image_size is \[8, 4\]: a HydraBeit reads square images"):
        HydraBeitModel.config_class(image_size=[8, 4], patch_size=4)
    with pytest.raises(ValueError, match="flex_attention"):
        hydra.set_attn_implementation("flex_attention")
