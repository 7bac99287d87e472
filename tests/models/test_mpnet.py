"""MPNet's bias of positions: one table for all layers, of which each takes the columns of its own heads."""

import copy

import pytest
import torch

from hydra_transformers import HydraMPNetForSequenceClassification
from hydra_transformers.fast.layers import can_run_fast
from hydra_transformers.fusion import to_transformers
from hydra_transformers.models.modeling_hydra import PerMember
from tests.families import MPNET, padded_texts


TABLE = "mpnet.encoder.relative_attention_bias.weight"
# Further apart than the 128 tokens from which on all distances are one.
LONG = {"max_position_embeddings": 200}


def backbone_table(seed: int) -> torch.Tensor:
    return MPNET.backbone(seed).get_parameter(TABLE)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_texts_of_every_length_get_the_bias_of_mpnet(implementation):
    backbone, texts = MPNET.backbone(**LONG), padded_texts(batch=3, tokens=150)
    hydra = HydraMPNetForSequenceClassification.from_backbone(backbone)
    hydra.set_attn_implementation(implementation)
    for inputs in (texts, {"input_ids": texts["input_ids"]}):
        expected = backbone(**inputs, output_hidden_states=True)
        found = hydra(**inputs, output_hidden_states=True)
        torch.testing.assert_close(found.logits, expected.logits.log_softmax(-1), atol=1e-10, rtol=0)
        for ours, theirs in zip(found.hidden_states, expected.hidden_states, strict=True):
            torch.testing.assert_close(ours[:, 0], theirs, atol=1e-10, rtol=0)


@torch.no_grad()
def test_the_bias_reaches_every_layer():
    hydra = HydraMPNetForSequenceClassification.from_backbone(MPNET.backbone())
    before = hydra(**MPNET.inputs(), output_hidden_states=True).hidden_states
    hydra.mpnet.relative_attention_bias.weight.zero_()
    after = hydra(**MPNET.inputs(), output_hidden_states=True).hidden_states
    assert torch.equal(after[0], before[0])
    assert not any(torch.allclose(after[layer], before[layer], atol=1e-3) for layer in (1, 2, 3))


@torch.no_grad()
def test_a_text_of_padding_alone_is_what_it_is_for_mpnet():
    backbone, texts = MPNET.backbone(), MPNET.inputs()
    texts["attention_mask"][1] = 0
    for implementation in ("eager", "sdpa"):
        hydra = HydraMPNetForSequenceClassification.from_backbone(backbone)
        hydra.set_attn_implementation(implementation)
        found, expected = hydra(**texts).logits, backbone(**texts).logits.log_softmax(-1)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("shared", "is_one"), [(("embeddings", "mlp"), True), (("layernorm", "mlp"), False)])
def test_members_share_the_mean_of_their_tables_with_their_embeddings_or_keep_their_own(shared, is_one):
    found = MPNET.fused(shared=shared).mpnet.relative_attention_bias
    tables = [backbone_table(seed) for seed in range(3)]
    if is_one:
        assert torch.equal(found.weight, torch.stack(tables).mean(0))
    else:
        assert isinstance(found, PerMember)
        assert all(torch.equal(own.weight, table) for own, table in zip(found, tables, strict=True))


def test_a_head_that_all_layers_have_lost_leaves_its_column():
    member = HydraMPNetForSequenceClassification.from_backbone(MPNET.backbone(), {layer: [2] for layer in range(3)})
    assert torch.equal(member.mpnet.relative_attention_bias.weight, backbone_table(0))
    member(**MPNET.inputs()).logits.sum().backward()
    gradient = member.mpnet.relative_attention_bias.weight.grad
    assert gradient[:, 2].eq(0).all()
    assert gradient[:, [0, 1, 3]].ne(0).any(0).all()


@torch.no_grad()
def test_a_plain_mpnet_has_every_head_where_its_column_is():
    member = HydraMPNetForSequenceClassification.from_backbone(MPNET.backbone(), {0: [1], 2: [0, 3]})
    plain = to_transformers(member, fill_up=True)  # a layer keeps all of its heads, as the plain model has them
    torch.testing.assert_close(plain(**MPNET.inputs()).logits, member(**MPNET.inputs()).member_logits[:, 0])


def test_members_of_one_backbone_with_other_tables_have_no_layer_in_common():
    first = MPNET.backbone()
    second = copy.deepcopy(first)
    same = HydraMPNetForSequenceClassification.from_pruned_members([first, second], allow_equal=True)
    assert same.config.trunk_layers == 3
    with torch.no_grad():
        second.get_parameter(TABLE)[0, 0] += 1
    other = HydraMPNetForSequenceClassification.from_pruned_members([first, second])
    assert other.config.trunk_layers == 0


@torch.no_grad()
def test_the_fast_way_is_left_alone():
    hydra = HydraMPNetForSequenceClassification.from_backbone(MPNET.backbone())
    states, mask, for_layers = hydra.mpnet.embed_inputs(**MPNET.inputs())
    assert can_run_fast(hydra.mpnet.layers, states, mask, {})
    assert not can_run_fast(hydra.mpnet.layers, states, mask, for_layers)


def test_a_backend_that_cannot_add_a_bias_is_refused():
    hydra = HydraMPNetForSequenceClassification.from_backbone(MPNET.backbone())
    with pytest.raises(ValueError, match="Flash Attention"):
        hydra.set_attn_implementation("flash_attention_2")
    hydra.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2', which cannot add a bias of positions: use 'eager' or"):
        hydra(input_ids=MPNET.inputs()["input_ids"])


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_every_kind_of_checkpoint_lets_gradients_through_to_the_table(is_reentrant):
    def gradient(hydra: torch.nn.Module) -> torch.Tensor:
        hydra(**MPNET.inputs(), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
        return hydra.mpnet.relative_attention_bias.weight.grad

    expected = gradient(MPNET.fused())
    hydra = MPNET.fused()
    for layer in hydra.mpnet.layers:  # as in training, which would drop out
        layer.training = True
    hydra.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
    assert expected.ne(0).any()
    torch.testing.assert_close(gradient(hydra), expected, atol=1e-12, rtol=0)
