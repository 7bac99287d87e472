"""A pruned model as a plain model of Transformers, which answers alike and which every tool takes."""

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoModel, AutoModelForImageClassification

from hydra_transformers import HydraBertModel, HydraViTModel
from hydra_transformers.pruning import prune_heads, to_transformers
from tests.families import BERT, CLIP, DEIT, DINOV2, DINOV2_GATED, VIT, Family


# DINOv2's config has it from Transformers 5.18 on.
HAS_HEAD_DIM = [VIT, DEIT] + [DINOV2, DINOV2_GATED] * (Version(transformers.__version__) >= Version("5.18"))
UNIFORM = {0: [1, 3], 1: [0, 2], 2: [2, 3]}
RAGGED = {0: [1], 1: [0, 1, 2, 3], 2: [0, 3]}


def plain_logits(family: Family, model) -> torch.Tensor:
    with torch.no_grad():
        return family.logits(model, **family.inputs())


def own_logits(family: Family, hydra) -> torch.Tensor:
    with torch.no_grad():
        outputs = hydra(**family.inputs())
    return outputs.similarity if family.has_towers else outputs.member_logits[:, 0]


@pytest.mark.parametrize("family", HAS_HEAD_DIM, ids=lambda family: family.name)
def test_equal_layers_become_a_smaller_plain_model(family, tmp_path):
    member = prune_heads(family.backbone(), UNIFORM)
    plain = to_transformers(member)
    assert type(plain) is type(family.backbone())
    assert (plain.config.num_attention_heads, plain.config.head_dim) == (2, 8)
    assert plain.num_parameters() < family.backbone().num_parameters()
    torch.testing.assert_close(plain_logits(family, plain), own_logits(family, member), rtol=0, atol=1e-10)
    plain.save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(plain_logits(family, loaded), plain_logits(family, plain))


def test_any_head_set_becomes_a_plain_model_with_heads_of_zeros(family):
    heads = {"vision": RAGGED, "text": {2: [2]}} if family.has_towers else RAGGED
    member = prune_heads(family.backbone(), heads)
    plain = to_transformers(member, fill_up=True)
    torch.testing.assert_close(plain_logits(family, plain), own_logits(family, member), rtol=0, atol=1e-10)
    assert not plain.training
    if family is VIT:
        assert plain.config.num_attention_heads == 4
        assert plain.vit.layers[1].attention.q_proj.weight.abs().max() == 0


@pytest.mark.parametrize("family", [VIT, BERT, CLIP], ids=lambda family: family.name)
def test_a_model_that_lost_nothing_comes_back_as_it_was(family):
    backbone = family.backbone()
    random_state = torch.get_rng_state()
    plain = to_transformers(prune_heads(backbone))
    assert torch.equal(torch.get_rng_state(), random_state)
    expected = backbone.state_dict()
    assert plain.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in plain.state_dict().items())


def test_encoders_come_back_with_and_without_a_pooler(tmp_path):
    for add_pooling_layer in (True, False):
        encoder = type(BERT.backbone().bert)(BERT.backbone().config, add_pooling_layer=add_pooling_layer)
        plain = to_transformers(HydraBertModel.from_backbone(encoder))
        assert (plain.pooler is not None) is add_pooling_layer
    encoder = HydraViTModel.from_backbone(VIT.backbone().vit, UNIFORM)
    to_transformers(encoder).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = encoder(**VIT.inputs()).last_hidden_state
        loaded = AutoModel.from_pretrained(tmp_path, add_pooling_layer=False)
        torch.testing.assert_close(loaded(**VIT.inputs()).last_hidden_state, expected, rtol=0, atol=1e-10)


def test_a_plain_model_becomes_a_hydra_again():
    member = prune_heads(VIT.backbone(), UNIFORM)
    again = prune_heads(to_transformers(member))
    assert again.config.kept_heads == [[[0, 1]]] * 3
    torch.testing.assert_close(own_logits(VIT, again), own_logits(VIT, member), rtol=0, atol=1e-12)
