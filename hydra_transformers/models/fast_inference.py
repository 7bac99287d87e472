"""The door to the layers: `run_layers` calls them one after the other, or in plain inference computes what they compute
without a call of any module.

At small batches calling modules and launching kernels takes longer than computing, and at large ones passes over the
memory do. The fast way therefore

- adds the output projection onto the residual sum where that lies, without a pass of its own;
- where launches decide, runs in inference mode, which takes a tenth off every call, and copies only the result out of it;
- runs members that keep different numbers of heads side by side all the same: on a GPU, unless rows are many, heads of
  zeros fill up those that keep fewer. Otherwise one member runs after the other, which copies nothing between them;
- takes elementwise work of large batches in one pass (`fast_kernels`).

A layer is taken only where a call of it could mean nothing else: it and its children are of the very classes known here,
without hooks, adapters, offloaded or quantised weights, parts that members do not share, other attention backends, training.
`HYDRA_FAST_INFERENCE=0` in the environment, or `fast_inference=False` in the config, switches the fast way off.

States are (members or 1, rows, hidden) on the fast way; a row is a token of the batch.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from .attention import HydraAttention, has_rows, mask_of_first_token, split_heads
from .compat import has_global_hooks, is_exporting, is_watched, quickly_launched_attention
from .fast_kernels import activate, add_and_layer_norm, layer_norm
from .grouped import GroupedLinear, GroupedOutput, are_few, grouped_product
from .layer import HydraLayer, HydraMLP


# From this many rows per member on, a GPU is busy for longer with heads of zeros than it takes to launch kernels for one
# member after the other.
ROWS_TO_FILL_UP = {torch.float16: 8192, torch.bfloat16: 8192, torch.float32: 2048}

# What callers pass on to layers that these have no use for.
WITHOUT_EFFECT = {"num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict", "use_cache"}

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


def run_layers(
    layers: Sequence[HydraLayer], hidden_states: torch.Tensor, attention_mask=None, first_token_only=False, **kwargs
) -> torch.Tensor:
    """All layers in turn: (members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden).

    attention_mask: what `encoder_mask` or `members_mask` returns
    first_token_only: let the last layer compute the first token alone
    kwargs: for the layers
    """
    if can_run_fast(layers, hidden_states, attention_mask, kwargs):
        return _run_fast(layers, hidden_states, attention_mask, first_token_only, **kwargs)
    for index, layer in enumerate(layers, start=1):
        hidden_states = layer(hidden_states, attention_mask, first_token_only and index == len(layers), **kwargs)
    return hidden_states


# Which layers are taken


def can_run_fast(
    layers: Sequence[HydraLayer], states: torch.Tensor, attention_mask, kwargs: Mapping[str, Any]
) -> bool:
    """Whether layers may run fast on these states, whatever the single layer says: nobody differentiates, casts,
    compiles, exports, traces, transforms, watches or only pretends to compute."""
    config = layers[0].attention.config if layers and isinstance(layers[0], HydraLayer) else None
    return (
        config is not None
        and config.fast_inference
        and os.environ.get("HYDRA_FAST_INFERENCE", "1") != "0"
        and config._attn_implementation == "sdpa"
        and not torch.is_grad_enabled()
        and not states.is_meta
        and not torch.is_autocast_enabled(states.device.type)
        and not torch.compiler.is_compiling()
        and not is_exporting()
        and not is_watched()
        and not has_global_hooks()
        and states.is_contiguous()
        and states.numel() > 0
        and has_rows(attention_mask)
        and all(value is None or name in WITHOUT_EFFECT | {"is_causal"} for name, value in kwargs.items())
    )


class FastLayer(NamedTuple):
    """What a layer computes with.

    qkv, o: where members have one width (members, 3 * width, hidden) and (members, 1, 3 * width), and (members, width,
        hidden) and (members, 1, hidden); otherwise packed, as the modules have them
    """

    attention: HydraAttention
    widths: tuple[int, ...]
    qkv: WeightAndBias
    o: WeightAndBias
    fc1: WeightAndBias
    fc2: WeightAndBias
    activation: nn.Module
    has_gate: bool
    attention_norm: nn.LayerNorm
    mlp_norm: nn.LayerNorm

    @property
    def is_uniform(self) -> bool:
        return len(set(self.widths)) == 1


def fast_layer(layer: nn.Module) -> FastLayer | None:
    """The parts of a layer, if it is made of them and nothing else."""
    if not is_plain(layer, (HydraLayer, PARTS)):
        return None
    # The modules' own dictionaries: attribute access on modules takes a search through three of them each time.
    parts = layer._modules
    attention, mlp, dropout = parts["attention"], parts["mlp"], parts.get("dropout")
    # Someone may have switched single dropouts on, to sample from them.
    if layer.training or attention.training or (dropout is not None and dropout.training):
        return None
    qkv, o = attention._modules["qkv_proj"], attention._modules["o_proj"]
    fc1, fc2, activation = map(mlp._modules.__getitem__, ("fc1", "fc2", "activation_fn"))
    norms = parts["attention_norm"], parts["mlp_norm"]
    parameters = [weight_and_bias(part) for part in (qkv, o, fc1, fc2, *norms)]
    widths = tuple(o.widths)
    if None in parameters or not any(widths):
        return None
    maps = parameters[:4]
    if len(set(widths)) == 1:
        maps[:2] = [side_by_side(*each, len(widths)) for each in maps[:2]]
    return FastLayer(attention, widths, *maps, activation, mlp.has_gate, *norms)


# What a layer is made of: (class, children), where an activation may be of any class and `dropout` may be missing.
NORM, LINEAR = (nn.LayerNorm, {}), (nn.Linear, {})
ATTENTION = (HydraAttention, {"qkv_proj": (GroupedLinear, {}), "o_proj": (GroupedOutput, {})})
MLP = (HydraMLP, {"fc1": LINEAR, "activation_fn": (None, {}), "fc2": LINEAR})
PARTS = {"attention_norm": NORM, "attention": ATTENTION, "mlp_norm": NORM, "mlp": MLP, "dropout": (nn.Dropout, {})}
# What an instance may have been given in place of its class's methods, or in front of them.
OWN_METHODS = frozenset({"forward", "heads", "complete", "__call__", "_compiled_call_impl", "_is_replica"})


def is_plain(module: nn.Module, kind: tuple[type | None, dict[str, Any]]) -> bool:
    """Whether a module is of this very class, with these children and no others, and nothing happens around its forward:
    no adapter, hook, offloading, nor a replica of `nn.DataParallel`, which holds its parameters elsewhere."""
    own_class, known = kind
    if own_class is not None and module.__class__ is not own_class:
        return False
    state = module.__dict__
    if state["_forward_hooks"] or state["_forward_pre_hooks"] or not OWN_METHODS.isdisjoint(state):
        return False
    children = state["_modules"]
    if not children and not known:
        return True
    if children.keys() != known.keys() and children.keys() != known.keys() - {"dropout"}:
        return False
    return all(is_plain(child, known[name]) for name, child in children.items())


def weight_and_bias(module: nn.Module) -> WeightAndBias | None:
    """A module's own parameters, as plain tensors; None where they are computed from others (`torch.nn.utils.prune`),
    missing, or of a kind of their own (quantised, distributed)."""
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight.__class__ is not nn.Parameter or "bias" not in parameters:
        return None
    return (weight, bias) if bias is None or bias.__class__ is nn.Parameter else None


def side_by_side(weight: torch.Tensor, bias: torch.Tensor | None, members: int) -> WeightAndBias:
    """Packed parameters of members of one width, with an axis for the members."""
    return weight.view(members, -1, weight.shape[1]), None if bias is None else bias.view(members, 1, -1)


# The loop


class Batch(NamedTuple):
    """How the rows of the states came about, and what decides on how to compute them."""

    size: int
    tokens: int
    mask: torch.Tensor | None  # (members * batch, ...), what `encoder_mask` or `members_mask` returns
    is_causal: bool
    has_few_rows: bool
    is_launch_bound: bool
    first_token_only: bool = False  # let only the first token ask


def _run_fast(
    layers: Sequence[HydraLayer], hidden_states: torch.Tensor, attention_mask, first_token_only: bool, **kwargs
) -> torch.Tensor:
    _, size, tokens, hidden = hidden_states.shape
    states = hidden_states.view(-1, size * tokens, hidden)
    few, is_causal = are_few(size * tokens), kwargs.get("is_causal") or False
    batch = Batch(size, tokens, attention_mask, is_causal, few, few and launches_take_longest(states))
    parts = [fast_layer(layer) for layer in layers]
    # A layer that is called may keep what it is given: that has to be of the caller's mode.
    in_inference_mode = batch.is_launch_bound and None not in parts and not torch.is_inference_mode_enabled()
    with torch.inference_mode() if in_inference_mode else nullcontext():
        biases = filled_up_biases(parts) if zeros_cost_little(states) else {}
        for index, (layer, part) in enumerate(zip(layers, parts, strict=True)):
            only_first = first_token_only and index == len(layers) - 1
            if part is None:
                states = states.view(-1, batch.size, batch.tokens, hidden)
                states = layer(states, attention_mask, only_first, **kwargs)
                batch = batch._replace(size=states.shape[1], tokens=states.shape[2])
                states = states.flatten(1, 2)
                continue
            batch = batch._replace(first_token_only=only_first)
            run = norm_first_layer if layer.norm_first else norm_last_layer
            # What is filled up is made when it is needed, and gone before the next is made.
            states = run(filled_up(part, biases[index]) if index in biases else part, states, batch)
    states = states.clone() if in_inference_mode else states
    return states.view(states.shape[0], batch.size, -1, hidden)


def launches_take_longest(states: torch.Tensor) -> bool:
    """Whether launching the kernels for a few rows takes longer than running them: a GPU with 16-bit numbers."""
    return states.is_cuda and states.element_size() == 2


def zeros_cost_little(states: torch.Tensor) -> bool:
    """Whether heads of zeros cost less than launching kernels for one member after the other."""
    return states.is_cuda and states.shape[1] < ROWS_TO_FILL_UP.get(states.dtype, 0)


# A layer


def norm_first_layer(layer: FastLayer, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); equations 4 to 7."""
    normed = _norm(layer.attention_norm, states, batch)
    total, normed = _attend_add_norm(layer, layer.mlp_norm, normed, states, batch)
    return _mlp(layer, normed, batch).add_(total)


def norm_last_layer(layer: FastLayer, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); LayerNorms behind the sums."""
    _, states = _attend_add_norm(layer, layer.attention_norm, states, states, batch)
    return _add_norm(layer.mlp_norm, states, _mlp(layer, states, batch), batch)[1]


def _attend_add_norm(
    layer: FastLayer, norm: nn.LayerNorm, states: torch.Tensor, residual: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + attention(states)` and `norm(total)`: twice (members, rows or batch, hidden)."""
    if batch.first_token_only:
        residual = _first_tokens(residual, batch)
    if states.shape[0] < len(layer.widths):
        states = states.expand(len(layer.widths), -1, -1)
    if not layer.is_uniform:
        return _add_norm(norm, residual, _one_member_after_the_other(layer, states, batch), batch)
    heads, (weight, bias) = _heads(layer.attention, *layer.qkv, states, batch), layer.o
    if not batch.has_few_rows:
        return _add_norm(norm, residual, _product(heads, weight, bias), batch)
    total = (residual + bias).baddbmm_(heads, weight)
    return total, _norm(norm, total, batch)


def _one_member_after_the_other(layer: FastLayer, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The attention of members that keep different numbers of heads: (members, rows, hidden) -> (members, rows or batch,
    hidden)"""
    members, rows, hidden = states.shape
    (weight, bias), (output_weight, output_biases) = layer.qkv, layer.o
    joint_widths = [3 * width for width in layer.widths]
    weights, output_weights = weight.split(joint_widths), output_weight.split(layer.widths)
    biases = [None] * members if bias is None else bias.view(1, 1, -1).split(joint_widths, dim=2)
    output = states.new_empty(members, batch.size if batch.first_token_only else rows, hidden)
    for m, output_bias in enumerate(output_biases):
        if layer.widths[m] == 0:
            output[m] = output_bias
            continue
        heads = _heads(layer.attention, weights[m].unsqueeze(0), biases[m], states[m : m + 1], batch)
        torch.addmm(output_bias, heads[0], output_weights[m], out=output[m])
    return output


def _heads(
    attention: HydraAttention, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """What the heads of members with equally many of them give: (members, rows, hidden) -> (members, rows or batch,
    width)

    weight, bias: of q, k and v together, (members, 3 * width, hidden) and (members, 1, 3 * width)
    """
    members, mask, tokens = states.shape[0], batch.mask, batch.tokens
    weight = weight.transpose(1, 2)

    def split(projected: torch.Tensor, tokens: int, projections: int) -> tuple[torch.Tensor, ...]:
        return split_heads(projected.view(members * batch.size, tokens, -1), projections, attention.head_dim)

    if batch.first_token_only and not batch.is_launch_bound:
        q, kv = slice(weight.shape[2] // 3), slice(weight.shape[2] // 3, None)
        query = _product(_first_tokens(states, batch), weight[..., q], None if bias is None else bias[..., q])
        joint = _product(states, weight[..., kv], None if bias is None else bias[..., kv])
        query, key, value = *split(query, 1, 1), *split(joint, tokens, 2)
    else:
        query, key, value = split(_product(states, weight, bias), tokens, 3)
    if mask is not None:
        mask = mask[: members * batch.size]
    if batch.first_token_only:
        query, mask, tokens = query[:, :, :1], mask_of_first_token(mask), 1
    output = _attend(query, key, value, mask, attention.scaling, batch)
    return output.transpose(1, 2).reshape(members, batch.size * tokens, -1)


def _attend(query, key, value, mask, scaling: float, batch: Batch) -> torch.Tensor:
    """(rows, heads, tokens, head_dim) each -> (rows, heads, query tokens, head_dim)"""
    is_causal = batch.is_causal and mask is None and query.shape[2] > 1
    quick = quickly_launched_attention() if batch.is_launch_bound and query.is_cuda and mask is None else None
    if quick is not None and query.shape[3] % 8 == 0:
        return quick(query, key, value, None, False, 0.0, is_causal, scale=scaling)[0]
    return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=is_causal)


def _product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`grouped_product`, written where it belongs: (members, rows, in) -> (members, rows, out)"""
    members, rows, _ = inputs.shape
    if members == 1 or bias is None or are_few(rows):
        return grouped_product(inputs, weight, bias)
    products = inputs.new_empty(members, rows, weight.shape[-1])
    for m in range(members):
        torch.addmm(bias[m, 0], inputs[m], weight[m], out=products[m])
    return products


def _first_tokens(states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members or 1, batch, hidden)"""
    return states.view(-1, batch.size, batch.tokens, states.shape[-1])[:, :, 0]


def _mlp(layer: FastLayer, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    inner = linear(states, *layer.fc1)
    if layer.has_gate:
        gate, inner = inner.chunk(2, dim=-1)
        return linear(layer.activation.forward(gate) * inner, *layer.fc2)
    inner = layer.activation.forward(inner) if batch.is_launch_bound else activate(layer.activation, inner)
    return linear(inner, *layer.fc2)


def _norm(norm: nn.LayerNorm, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    if not batch.is_launch_bound:
        return layer_norm(norm, states)
    parameters = norm._parameters
    return torch.layer_norm(states, norm.normalized_shape, parameters["weight"], parameters["bias"], norm.eps)


def _add_norm(
    norm: nn.LayerNorm, residual: torch.Tensor, branch: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + branch` and `norm(total)`"""
    if not batch.has_few_rows:
        return add_and_layer_norm(norm, residual, branch)
    total = branch.add_(residual)
    return total, _norm(norm, total, batch)


# Members of different widths, filled up with heads of zeros to the widest


def filled_up(layer: FastLayer, bias: torch.Tensor | None) -> FastLayer:
    """A layer whose members have one width, with this bias of q, k and v."""
    (qkv, _), (o, output_bias), members, widest = layer.qkv, layer.o, len(layer.widths), max(layer.widths)
    stacked = torch.cat((qkv, o, _zeros(qkv.shape[1], qkv.dtype, qkv.device)))
    rows = _filled_up_rows((layer.widths,), True, qkv.device)
    qkv, o = stacked.index_select(0, rows).view(members, 4 * widest, -1).split((3 * widest, widest), dim=1)
    return layer._replace(widths=(widest,) * members, qkv=(qkv, bias), o=(o, output_bias.unsqueeze(1)))


def filled_up_biases(layers: Sequence[FastLayer | None]) -> dict[int, torch.Tensor | None]:
    """By number of each layer that needs it, its bias of q, k and v, (members, 1, 3 * widest); of all layers at once."""
    ragged = {index: layer for index, layer in enumerate(layers) if layer is not None and not layer.is_uniform}
    biases = [layer.qkv[1] for layer in ragged.values()]
    if not biases or biases[0] is None:
        return dict.fromkeys(ragged)
    widths, like = tuple(layer.widths for layer in ragged.values()), biases[0]
    stacked = torch.cat([*biases, _zeros(1, like.dtype, like.device)[0]])
    filled = stacked.index_select(0, _filled_up_rows(widths, False, like.device))
    filled = filled.split([3 * len(own) * max(own) for own in widths])
    return {index: bias.view(len(own), 1, -1) for index, own, bias in zip(ragged, widths, filled, strict=True)}


@lru_cache(maxsize=128)
def _filled_up_rows(
    widths_of_layers: tuple[tuple[int, ...], ...], with_output: bool, device: torch.device
) -> torch.Tensor:
    """Where the rows of each member lie in packed weights of layers, one layer's qkv (and with_output its o) below the
    other's: layer by layer, member by member, filled up to the layer's widest with the row of zeros behind them all."""
    per_width = 4 if with_output else 3
    zero, start, rows = per_width * sum(map(sum, widths_of_layers)), 0, []
    for widths in widths_of_layers:
        for m, width in enumerate(widths):
            firsts = [start + 3 * sum(widths[:m]) + projection * width for projection in range(3)]
            if with_output:
                firsts.append(start + 3 * sum(widths) + sum(widths[:m]))
            for first in firsts:
                rows += range(first, first + width)
                rows += [zero] * (max(widths) - width)
        start += per_width * sum(widths)
    return torch.tensor(rows, device=device)


@lru_cache(maxsize=64)
def _zeros(columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, columns, dtype=dtype, device=device)
