"""Layers for small batches in plain inference, where calling and launching things takes longer than computing them.

The functions here compute what the layers' own `forward` computes, from the same parameters and with the same
operations, without the module calls around each of them. `can_run_bare` says no wherever those calls could mean
something: hooks, adapters, offloaded weights, parts that are not shared, other attention backends, training.
"""

import torch
from torch import nn

from .grouped import ROWS_FOR_ONE_PRODUCT_PER_MEMBER, GroupedLinear, GroupedOutput
from .kernels import is_plain_inference


def can_run_bare(layer: nn.Module, layernorms: tuple, hidden_states: torch.Tensor, attention_mask) -> bool:
    """Whether one of the functions below gives a layer's result on (members, batch, tokens, hidden)."""
    attention, mlp = layer.attention, layer.mlp
    return (
        hidden_states.shape[0] > 1
        and hidden_states.shape[1] * hidden_states.shape[2] < ROWS_FOR_ONE_PRODUCT_PER_MEMBER
        and not layer.training
        and is_plain_inference(hidden_states)
        and attention.is_uniform
        and not attention.has_no_head
        and (attention_mask is None or attention_mask.__class__ is torch.Tensor)
        and attention.config._attn_implementation == "sdpa"
        and _is_bare(attention)
        and _is_bare(attention.q_proj, GroupedLinear)
        and _is_bare(attention.k_proj, GroupedLinear)
        and _is_bare(attention.v_proj, GroupedLinear)
        and _is_bare(attention.o_proj, GroupedOutput)
        and _is_bare(layernorms[0], nn.LayerNorm)
        and _is_bare(layernorms[1], nn.LayerNorm)
        and hasattr(mlp, "fc1")
        and _is_bare(mlp)
        and _is_bare(mlp.fc1, nn.Linear)
        and _is_bare(mlp.fc2, nn.Linear)
        and _is_bare(mlp.activation_fn)
    )


def pre_norm_layer(layer: nn.Module, hidden_states: torch.Tensor, attention_mask, is_causal=False) -> torch.Tensor:
    """(members, batch, tokens, hidden) -> the same; equations 4 to 7."""
    normed = _layer_norm(layer.layernorm_before, hidden_states)
    hidden_states = hidden_states + _attention(layer.attention, normed, attention_mask, is_causal)
    normed = _layer_norm(layer.layernorm_after, hidden_states)
    return hidden_states + _mlp(layer.mlp, normed)


def post_norm_layer(layer: nn.Module, hidden_states: torch.Tensor, attention_mask) -> torch.Tensor:
    """(members, batch, tokens, hidden) -> the same; equations 4 to 7 with the LayerNorms behind the sums."""
    attention = _attention(layer.attention, hidden_states, attention_mask)
    hidden_states = _layer_norm(layer.attention_layernorm, hidden_states + attention)
    return _layer_norm(layer.output_layernorm, hidden_states + _mlp(layer.mlp, hidden_states))


def _is_bare(module: nn.Module, kind: type | None = None) -> bool:
    """Whether a module is of this very type, where one is given, and nothing happens around its forward."""
    return (
        (kind is None or module.__class__ is kind)
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
    )


def _layer_norm(norm: nn.LayerNorm, hidden_states: torch.Tensor) -> torch.Tensor:
    return torch.layer_norm(hidden_states, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def _attention(attention: nn.Module, hidden_states: torch.Tensor, attention_mask, is_causal=False) -> torch.Tensor:
    members, batch, tokens, hidden = hidden_states.shape
    q, k, v, o = attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj
    shape = (members, -1, hidden)
    weight = torch.cat((q.weight.view(shape), k.weight.view(shape), v.weight.view(shape)), dim=1).transpose(1, 2)
    rows = hidden_states.view(shape)
    if q.bias is None:
        joint = torch.bmm(rows, weight)
    else:
        shape = (members, 1, -1)
        bias = torch.cat((q.bias.view(shape), k.bias.view(shape), v.bias.view(shape)), dim=2)
        joint = torch.baddbmm(bias, rows, weight)
    query, key, value = joint.view(members * batch, tokens, 3, -1, attention.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        scale=attention.scaling,
        is_causal=is_causal and attention_mask is None and tokens > 1,
    )
    output = output.transpose(1, 2).reshape(members, batch * tokens, -1)
    output = torch.baddbmm(o.bias.view(members, 1, hidden), output, o.weight.view(members, -1, hidden))
    return output.view(hidden_states.shape)


def _mlp(mlp: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    inner = nn.functional.linear(hidden_states, mlp.fc1.weight, mlp.fc1.bias)
    return nn.functional.linear(mlp.activation_fn.forward(inner), mlp.fc2.weight, mlp.fc2.bias)
