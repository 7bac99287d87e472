"""Layers for small batches in plain inference, where calling and launching things takes longer than computing them.

The functions here compute what the layers' own `forward` computes, from the same parameters and with the same
operations, without the module calls around each of them. `bare_parts` says no wherever those calls could mean
something: hooks, adapters, offloaded weights, parts that are not shared, other attention backends, training.
"""

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from .attention import HydraAttention, HydraMLP, has_rows, mask_of_first_token, split_heads
from .grouped import (
    ROWS_FOR_ONE_PRODUCT_PER_MEMBER,
    GroupedLinear,
    GroupedOutput,
    grouped_product,
    side_by_side,
)
from .shortcuts import is_bare, is_plain_inference


PARTS = (
    ("attention", "q_proj", GroupedLinear),
    ("attention", "k_proj", GroupedLinear),
    ("attention", "v_proj", GroupedLinear),
    ("attention", "o_proj", GroupedOutput),
    ("mlp", "fc1", nn.Linear),
    ("mlp", "fc2", nn.Linear),
)


def bare_parts(layer: nn.Module, hidden_states: torch.Tensor, attention_mask, norms: tuple[str, str]) -> list | None:
    """The parts of a layer, [q, k, v, o, fc1, fc2, first norm, second norm], if it may run bare on these states.

    hidden_states: (members or 1, batch, tokens, hidden)
    norms: names of the layer's two LayerNorms
    """
    if layer.training or not is_plain_inference(hidden_states):
        return None
    _, batch, tokens, _ = hidden_states.shape
    if batch * tokens >= ROWS_FOR_ONE_PRODUCT_PER_MEMBER or not has_rows(attention_mask):
        return None
    # The modules' own dictionaries: attribute access on modules takes a search through three of them each time.
    modules = layer._modules
    attention, mlp = modules["attention"], modules["mlp"]
    if not (is_bare(attention, HydraAttention) and is_bare(mlp, HydraMLP) and attention.is_uniform):
        return None
    # Someone may have switched single dropouts on, to sample from them.
    if attention.training or mlp.training or ("dropout" in modules and modules["dropout"].training):
        return None
    if attention.has_no_head or attention.config._attn_implementation != "sdpa":
        return None
    if not is_bare(mlp._modules["activation_fn"], mlp._modules["activation_fn"].__class__):
        return None
    parts = []
    for owner, name, kind in PARTS:
        part = modules[owner]._modules[name]
        if not is_bare(part, kind):
            return None
        parts.append(part._parameters)
    for name in norms:
        if not is_bare(modules[name], nn.LayerNorm):
            return None
        parts.append(modules[name])
    return parts


def pre_norm_layer(
    layer: nn.Module,
    parts: list,
    hidden_states: torch.Tensor,
    attention_mask,
    first_token_only: bool = False,
    is_causal: bool = False,
) -> torch.Tensor:
    """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden); equations 4 to 7."""
    normed = _layer_norm(parts[6], hidden_states)
    attention = _attention(layer._modules["attention"], parts, normed, attention_mask, first_token_only, is_causal)
    if first_token_only:
        hidden_states = hidden_states[:, :, :1]
    hidden_states = hidden_states + attention
    return hidden_states + _mlp(layer._modules["mlp"], parts, _layer_norm(parts[7], hidden_states))


def post_norm_layer(
    layer: nn.Module, parts: list, hidden_states: torch.Tensor, attention_mask, first_token_only: bool = False
) -> torch.Tensor:
    """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden); LayerNorms behind the sums."""
    attention = _attention(layer._modules["attention"], parts, hidden_states, attention_mask, first_token_only)
    if first_token_only:
        hidden_states = hidden_states[:, :, :1]
    hidden_states = _layer_norm(parts[6], hidden_states + attention)
    return _layer_norm(parts[7], hidden_states + _mlp(layer._modules["mlp"], parts, hidden_states))


def _layer_norm(norm: nn.LayerNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    parameters = norm._parameters
    return torch.layer_norm(hidden_states, norm.normalized_shape, parameters["weight"], parameters["bias"], norm.eps)


def _mlp(mlp: nn.Module, parts: list, hidden_states: torch.Tensor) -> torch.Tensor:
    _, _, _, _, fc1, fc2, _, _ = parts
    inner = mlp._modules["activation_fn"].forward(linear(hidden_states, fc1["weight"], fc1["bias"]))
    return linear(inner, fc2["weight"], fc2["bias"])


def _attention(
    attention: nn.Module, parts: list, states: torch.Tensor, mask, first_token_only: bool, is_causal: bool = False
) -> torch.Tensor:
    """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden)"""
    q, k, v, o = parts[:4]
    blocks, batch, tokens, hidden = states.shape
    members, head_dim = attention.num_members, attention.head_dim
    rows = states.view(blocks, batch * tokens, hidden)
    if first_token_only:
        mask = mask_of_first_token(mask)
        query = _project((q,), states[:, :, :1].reshape(blocks, batch, hidden), 1, head_dim)
        projected, tokens = (*query, *_project((k, v), rows, tokens, head_dim)), 1
    else:
        projected = _project((q, k, v), rows, tokens, head_dim)
    if mask is not None and blocks == 1:
        mask = mask[:batch]
    output = scaled_dot_product_attention(
        *projected, attn_mask=mask, scale=attention.scaling, is_causal=is_causal and mask is None and tokens > 1
    )
    # (blocks * batch, heads, tokens, head_dim) -> (members, batch * tokens, width)
    output = output.transpose(1, 2).reshape(blocks, batch * tokens, -1)
    if blocks < members:
        output = output.view(batch * tokens, members, -1).transpose(0, 1)
    output = grouped_product(output, o["weight"].view(members, -1, hidden), o["bias"])
    return output.view(members, batch, tokens, hidden)


def _project(projections: tuple, rows: torch.Tensor, tokens: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """(blocks, rows, hidden) -> one (blocks * batch, heads, tokens, head_dim) per projection.

    A block is a member; where all members see the same rows, one block holds the heads of all of them.
    """
    joint = grouped_product(rows, *side_by_side(projections, rows.shape[0]))
    return split_heads(joint, tokens, len(projections), head_dim)
