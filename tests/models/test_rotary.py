"""Rotary positions in the shared attention: each head is turned as in a plain attention, whichever axis carries members."""

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from hydra_transformers import HydraBertConfig
from hydra_transformers.models.modeling_hydra import HydraLayer, hydra_layers
from hydra_transformers.models.rotary_attention import HydraRotaryAttention, rotated
from tests.families import LLAMA, MODERNBERT, for_families


HEAD_DIM, TOKENS, BATCH = 8, 5, 3
UNIFORM, RAGGED = [[0, 1], [1, 3], [2, 3]], [[0, 1, 3], [], [2]]


def layer_with(kept_heads: list[list[int]], **fields) -> HydraLayer:
    config = HydraBertConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, kept_heads=[kept_heads], vocab_size=8, **fields
    )
    config._attn_implementation = "sdpa"
    layer = hydra_layers(config, attention_class=HydraRotaryAttention)[0].double().eval()
    for place, parameter in enumerate(layer.parameters()):
        values = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
        parameter.data.copy_(values)
    return layer


def tables(position_ids: torch.Tensor, theta: float = 100.0) -> tuple[torch.Tensor, torch.Tensor]:
    frequencies = theta ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
    angles = position_ids[..., None].double() * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def states() -> torch.Tensor:
    return torch.randn(3, BATCH, TOKENS, 32, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


IN_ORDER = torch.arange(TOKENS).unsqueeze(0)
OF_EACH_ROW = torch.tensor([[0, 1, 2, 3, 4], [2, 3, 4, 5, 6], [0, 0, 1, 2, 9]])


def member_by_member(layer: HydraLayer, hidden_states, cos, sin) -> list[torch.Tensor]:
    """A plain attention for each member, (batch, tokens, width), before the output projection."""
    attention, given = layer.attention, []
    qkv = layer.attention.qkv_proj(hidden_states)
    for projected in qkv:
        query, key, value = projected.unflatten(-1, (3, -1, HEAD_DIM)).permute(2, 0, 3, 1, 4)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        weights = torch.softmax(query @ key.transpose(2, 3) * attention.scaling, dim=-1)
        given.append((weights @ value).transpose(1, 2).flatten(2))
    return given


@pytest.mark.parametrize("position_ids", [IN_ORDER, OF_EACH_ROW], ids=["in order", "of each row"])
@pytest.mark.parametrize("kept_heads", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
@pytest.mark.parametrize("backend", ["sdpa", "eager"])
def test_every_head_is_turned_as_in_a_plain_attention(kept_heads, position_ids, backend):
    layer, turns = layer_with(kept_heads), tables(position_ids)
    layer.attention.config._attn_implementation = backend
    expected = member_by_member(layer, states(), *turns)
    found = layer.attend(states(), None, False, turns)
    found = list(found) if kept_heads is UNIFORM else found.split([len(heads) * HEAD_DIM for heads in kept_heads], -1)
    found = [of_member for of_member in found if of_member.shape[-1]]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.parametrize("kept_heads", [UNIFORM, RAGGED], ids=["uniform", "ragged"])
def test_the_first_token_alone_is_turned_by_its_own_position(kept_heads):
    layer, turns = layer_with(kept_heads), tables(OF_EACH_ROW)
    everything = layer(states(), None, False, turns)
    first = layer(states(), None, True, turns)
    torch.testing.assert_close(first, everything[:, :, :1], rtol=0, atol=1e-10)


def test_positions_change_what_heads_give_and_their_differences_alone_count():
    layer = layer_with(UNIFORM)
    in_order = layer.attend(states(), None, False, tables(IN_ORDER))
    later = layer.attend(states(), None, False, tables(IN_ORDER + 7))
    torch.testing.assert_close(later, in_order, rtol=0, atol=1e-10)
    assert not torch.allclose(layer.attend(states()), in_order, atol=1e-3)


def test_a_layer_reads_the_tables_of_its_type():
    layer, local, everywhere = layer_with(UNIFORM), tables(IN_ORDER, 10.0), tables(IN_ORDER, 1000.0)
    layer.attention.layer_type = "sliding_attention"
    found = layer.attend(states(), None, False, {"sliding_attention": local, "full_attention": everywhere})
    assert torch.equal(found, layer.attend(states(), None, False, local))


def test_queries_and_keys_may_have_different_numbers_of_heads():
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(BATCH, heads, TOKENS, HEAD_DIM, generator=generator) for heads in (6, 2))
    turns = [table.float() for table in tables(OF_EACH_ROW)]
    expected = apply_rotary_pos_emb(query, key, *turns)
    assert torch.equal(rotated(query, *turns), expected[0])
    assert torch.equal(rotated(key, *turns), expected[1])


def test_half_precision_may_be_turned_in_float32():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(BATCH, 2, TOKENS, HEAD_DIM, generator=generator).bfloat16()
    turns = [table.bfloat16() for table in tables(IN_ORDER)]
    found = rotated(query, *turns, in_float32=True)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, apply_rotary_pos_emb(query.float(), query.float(), *turns)[0].bfloat16())


@for_families([LLAMA, MODERNBERT])
def test_a_model_that_is_cast_keeps_the_frequencies_of_its_positions(family):
    hydra = family.hydra.from_backbone(family.backbone().float())
    before = dict(hydra.model.rotary_emb.named_buffers())
    for cast in (hydra.bfloat16(), hydra.double(), hydra.to("meta", torch.float16)):
        found = dict(cast.model.rotary_emb.named_buffers())
        assert found.keys() == before.keys() and {buffer.dtype for buffer in found.values()} == {torch.float32}
        assert all(found[name].is_meta or torch.equal(found[name], before[name]) for name in before)
