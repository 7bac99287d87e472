"""DINOv3's encoder: positions in two directions, which turn the queries and keys of patches alone."""

import pytest
import torch
from transformers import AutoModel, DINOv3ViTModel

from hydra_transformers import AutoHydra, HydraDINOv3ViTModel
from hydra_transformers.cost import count_multiply_adds
from hydra_transformers.fusion import to_transformers
from hydra_transformers.models.auto import load_trained
from tests.families import DINOV3, RAGGED, images, randomise


pytestmark = pytest.mark.slow  # families other than ViT, BERT, CLIP and Llama


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize("shared", [(), ("embeddings", "layernorm", "mlp")], ids=str)
def test_members_are_side_by_side_and_never_mix(shared):
    backbones = [DINOV3.backbone(0 if shared else seed) for seed in range(3)]
    members = [AutoHydra.from_backbone(*each) for each in zip(backbones, RAGGED, strict=True)]
    hydra = AutoHydra.from_pruned_members(members, shared)
    outputs = hydra(images())
    expected = [DINOV3.ablate(*each)(images()).pooler_output for each in zip(backbones, RAGGED, strict=True)]
    for index, pooled in enumerate(expected):
        assert_close(outputs.member_pooler_output[:, index], pooled)
    assert_close(outputs.pooler_output, torch.stack(expected).mean(0))
    if not shared:
        outputs.member_pooler_output[:, 1].sum().backward()
        output = hydra.layers[0].attention.o_proj
        first, second, third = (rows.abs().max() for rows in output.weight.grad.split(output.widths))
        assert first == third == 0 and second > 0


@pytest.mark.parametrize("key_bias", [False, True])
def test_keys_learn_a_bias_where_those_of_the_backbone_have_one(key_bias):
    hydra = AutoHydra.from_backbone(DINOV3.backbone(key_bias=key_bias))
    hydra.train()(images()).pooler_output.square().sum().backward()
    query, key, value = hydra.layers[0].attention.qkv_proj.bias.grad.chunk(3)
    assert query.any() and value.any()
    assert key.any() == key_bias
    assert to_transformers(hydra).config.key_bias == key_bias


def test_a_saved_encoder_is_loaded_and_trained_key_biases_come_back(tmp_path):
    hydra = AutoHydra.from_backbone(DINOV3.backbone(key_bias=True))
    randomise(hydra, 5)
    with torch.no_grad():
        expected = hydra(images()).pooler_output
        plain = to_transformers(hydra).double()
        assert type(plain) is DINOv3ViTModel and plain.config.key_bias
        assert_close(plain(images()).pooler_output, expected)
        hydra.save_pretrained(tmp_path)
        loaded = AutoModel.from_pretrained(tmp_path, dtype=torch.float64)
        assert type(loaded) is HydraDINOv3ViTModel
        assert torch.equal(loaded(images()).pooler_output, expected)
        halves = [model.to(torch.bfloat16)(images().bfloat16()).pooler_output for model in (hydra, loaded)]
        assert torch.equal(*halves) and hydra.rope_embeddings.inv_freq.dtype == torch.float32


def test_fewer_heads_cost_less_and_there_is_no_classifier(tmp_path):
    whole, pruned = (AutoHydra.from_backbone(DINOV3.backbone(), heads) for heads in ({}, {0: [1]}))
    assert count_multiply_adds(whole) - count_multiply_adds(pruned) == 4 * 7 * 32 * 8 + 2 * 7**2 * 8
    DINOV3.backbone().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a dinov3_vit: not supported; dinov2"):
        load_trained(tmp_path)
    with pytest.raises(ValueError, match="query_bias is False and value_bias True"):
        AutoHydra.from_backbone(DINOV3.backbone(query_bias=False))
