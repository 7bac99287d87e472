"""PackedEnsemble: narrow networks that run as one, and never exchange anything."""

import pytest
import torch
from transformers import LlamaConfig

from hydra_transformers.baselines import PackedEnsemble
from hydra_transformers.cost import count_multiply_adds, count_parameters
from hydra_transformers.data.prediction import predict
from tests.families import ALBERT, BERT, CLIP_CLASSIFIER, DISTILBERT, LLAMA, VIT, WHISPER, each_of, vit_backbone


@each_of([VIT, BERT, ALBERT, DISTILBERT, LLAMA, WHISPER, CLIP_CLASSIFIER])
def test_members_are_alpha_over_m_as_wide_and_the_size_of_a_head_stays(family):
    model = family.backbone()
    packed = PackedEnsemble.from_backbone(model, num_members=4, alpha=2)
    config = getattr(model.config, "vision_config", model.config)
    narrow = packed.config
    assert packed.num_members == 4 and tuple(narrow.shared) == () and narrow.trunk_layers == 0
    assert narrow.hidden_size == config.hidden_size // 2
    assert narrow.num_attention_heads == config.num_attention_heads // 2
    assert packed.dtype == model.dtype
    assert predict(packed, family.inputs()).shape == (4, 4, model.config.num_labels)


@pytest.mark.parametrize("family", [VIT, BERT], ids=lambda family: family.name)
def test_members_never_mix(family):
    packed = PackedEnsemble.from_backbone(family.backbone(), num_members=2, alpha=1)
    member = packed.member(1)
    packed(**family.inputs()).member_logits[:, 1].square().sum().backward()
    own = member.num_parameters()
    touched = sum(int((parameter.grad != 0).sum()) for parameter in packed.parameters() if parameter.grad is not None)
    assert 0 < touched <= own
    torch.testing.assert_close(predict(packed, family.inputs())[:, 1:], predict(member, family.inputs()))


def test_member_by_member_they_are_the_models_class_with_weights_of_their_own_seed():
    model = vit_backbone()
    state = torch.get_rng_state()
    packed = PackedEnsemble.from_backbone(model, num_members=2, alpha=1, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    other = PackedEnsemble.from_backbone(vit_backbone(), num_members=2, alpha=1, seed=6)
    first = predict(packed, VIT.inputs())
    second = predict(other, VIT.inputs())
    torch.testing.assert_close(first[:, 1], second[:, 0])
    assert not torch.allclose(first[:, 0], first[:, 1])


@pytest.mark.slow
def test_the_encoder_costs_alpha_squared_over_m():
    """The matrices of the layers, that is: attention's own products and what reads the image go with alpha."""
    model = vit_backbone(image_size=32)
    packed = PackedEnsemble.from_backbone(model, num_members=4, alpha=2)

    def in_layers(of) -> int:
        return sum(each.numel() for name, each in of.named_parameters() if ".layers." in name and each.dim() == 2)

    narrow = type(model)(PackedEnsemble.narrow_config(model.config, num_members=4, alpha=2))
    assert count_parameters(packed) == 4 * count_parameters(narrow)
    assert in_layers(narrow) * 4 == in_layers(model) * 2**2 / 4
    assert count_multiply_adds(packed) == 4 * count_multiply_adds(packed.member(0))
    whole = PackedEnsemble.from_backbone(model, num_members=3, alpha=3)  # a Deep Ensemble of full-size models
    assert whole.config.hidden_size == model.config.hidden_size
    assert count_parameters(whole) == 3 * count_parameters(model)


@pytest.mark.parametrize(("keys", "expected"), [(12, 8), (4, 4), (6, 4), (1, 1)])
def test_about_as_many_heads_read_each_key_and_value(keys, expected):
    """Two of three heads are left; where all had their own keys, they still have."""
    config = LlamaConfig(hidden_size=24, intermediate_size=24, num_attention_heads=12, num_key_value_heads=keys)
    narrow = PackedEnsemble.narrow_config(config, num_members=3, alpha=2)
    assert (narrow.num_attention_heads, narrow.num_key_value_heads) == (8, expected)
