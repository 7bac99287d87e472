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
with no other child, without hooks, adapters, offloaded or quantised weights, parts that members do not share, other
attention backends, training. All other layers are called. `HYDRA_FAST_INFERENCE=0` in the environment, or
`fast_inference=False` in the config, switches the fast way off.

States are (members or 1, rows, hidden) on the fast way; a row is a token of the batch.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
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
from .layer import HydraGatedMLP, HydraLayer, HydraMLP


# From this many rows per member on, a GPU is busy for longer with heads of zeros than it takes to launch kernels for one
# member after the other.
ROWS_TO_FILL_UP = {torch.float16: 8192, torch.bfloat16: 8192, torch.float32: 2048}

# What callers pass on to layers that these have no use for.
KEYWORDS_WITHOUT_EFFECT = {
    "num_items_in_batch",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
}

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


def run_layers(
    layers: Sequence[HydraLayer],
    hidden_states: torch.Tensor,
    attention_mask=None,
    first_token_only: bool = False,
    **kwargs,
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


def can_run_fast(
    layers: Sequence[HydraLayer], hidden_states: torch.Tensor, attention_mask, kwargs: Mapping[str, Any]
) -> bool:
    """Whether layers may run fast on these states, whatever the single layer says."""
    config = layers[0].attention.config if layers and isinstance(layers[0], HydraLayer) else None
    return (
        config is not None
        and config.fast_inference
        and os.environ.get("HYDRA_FAST_INFERENCE", "1") != "0"
        and config._attn_implementation == "sdpa"
        and is_plain_inference(hidden_states)
        and hidden_states.is_contiguous()
        and hidden_states.numel() > 0
        and has_rows(attention_mask)
        and not has_global_hooks()
        and all(value is None or name in KEYWORDS_WITHOUT_EFFECT | {"is_causal"} for name, value in kwargs.items())
    )


def is_plain_inference(tensor: torch.Tensor) -> bool:
    """Whether nothing differentiates, casts, compiles, exports, traces, transforms or only pretends to compute."""
    return not (
        torch.is_grad_enabled()
        or tensor.is_meta
        or torch.is_autocast_enabled(tensor.device.type)
        or torch.compiler.is_compiling()
        or is_exporting()
        or is_watched()
    )


class FastLayer(NamedTuple):
    """What a layer computes with."""

    attention: HydraAttention
    widths: tuple[int, ...]
    qkv: WeightAndBias
    o: WeightAndBias
    fc1: WeightAndBias
    activation: nn.Module
    has_gate: bool
    fc2: WeightAndBias
    attention_norm: nn.LayerNorm
    mlp_norm: nn.LayerNorm

    @property
    def is_uniform(self) -> bool:
        return len(set(self.widths)) == 1


class Filled(NamedTuple):
    """The weights of a layer whose members keep different numbers of heads, filled up with zeros to the widest.

    weight, bias: of q, k and v, (members, 3 * widest, hidden) and (members, 1, 3 * widest)
    output_weight: of o, (members, widest, hidden)
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    output_weight: torch.Tensor


class Batch(NamedTuple):
    """How the rows of the states came about, and what decides on how to compute them."""

    size: int
    tokens: int
    mask: torch.Tensor | None  # (members * batch, ...), what `encoder_mask` or `members_mask` returns
    is_causal: bool
    has_few_rows: bool
    is_launch_bound: bool
    fills_up: bool  # whether heads of zeros fill up members that keep fewer heads than others


# Which layers are taken


def fast_layer(layer: nn.Module) -> FastLayer | None:
    """The parts of a layer, if it is made of them and nothing else."""
    # The modules' own dictionaries: attribute access on modules takes a search through three of them each time.
    modules = layer._modules
    dropout = modules.get("dropout")
    children = LAYER_CHILDREN if dropout is None else LAYER_CHILDREN | {"dropout"}
    if not is_plain(layer, HydraLayer, children) or layer.training:
        return None
    attention, mlp = modules["attention"], modules["mlp"]
    # Someone may have switched single dropouts on, to sample from them.
    if (dropout is not None and (not is_plain(dropout, nn.Dropout) or dropout.training)) or attention.training:
        return None
    has_gate = mlp.__class__ is HydraGatedMLP
    mlp_class = HydraGatedMLP if has_gate else HydraMLP
    if not (is_plain(attention, HydraAttention, ATTENTION_CHILDREN) and is_plain(mlp, mlp_class, MLP_CHILDREN)):
        return None
    qkv, o = attention._modules["qkv_proj"], attention._modules["o_proj"]
    fc1, activation, fc2 = map(mlp._modules.__getitem__, ("fc1", "activation_fn", "fc2"))
    attention_norm, mlp_norm = modules["attention_norm"], modules["mlp_norm"]
    if not (
        is_plain(qkv, GroupedLinear)
        and is_plain(o, GroupedOutput)
        and is_plain(fc1, nn.Linear)
        and is_plain(activation, activation.__class__)
        and is_plain(fc2, nn.Linear)
        and is_plain(attention_norm, nn.LayerNorm)
        and is_plain(mlp_norm, nn.LayerNorm)
    ):
        return None
    parameters = [weight_and_bias(part) for part in (qkv, o, fc1, fc2, attention_norm, mlp_norm)]
    if None in parameters or not any(o.widths):
        return None
    qkv, o_parameters, fc1, fc2, *_ = parameters
    widths = tuple(o.widths)
    return FastLayer(attention, widths, qkv, o_parameters, fc1, activation, has_gate, fc2, attention_norm, mlp_norm)


LAYER_CHILDREN = frozenset({"attention_norm", "attention", "mlp_norm", "mlp"})
ATTENTION_CHILDREN = frozenset({"qkv_proj", "o_proj"})
MLP_CHILDREN = frozenset({"fc1", "activation_fn", "fc2"})
# Methods that an instance may have been given in place of its class's.
METHODS = frozenset({"forward", "heads", "complete", "activate", "__call__"})


def is_plain(module: nn.Module, kind: type, children: frozenset[str] = frozenset()) -> bool:
    """Whether a module is of this very type, with these children and no others, and nothing happens around its forward:
    no adapter, hook, offloading, nor a replica of `nn.DataParallel`, which holds its parameters elsewhere."""
    state = module.__dict__
    return (
        module.__class__ is kind
        and state["_modules"].keys() == children
        and not state["_forward_hooks"]
        and not state["_forward_pre_hooks"]
        and METHODS.isdisjoint(state)
        and "_compiled_call_impl" not in state
        and "_is_replica" not in state
    )


def weight_and_bias(module: nn.Module) -> WeightAndBias | None:
    """A module's own parameters, as plain tensors; None where they are computed from others (`torch.nn.utils.prune`),
    missing, or of a kind of their own (quantised, distributed)."""
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight.__class__ is not nn.Parameter or "bias" not in parameters:
        return None
    return (weight, bias) if bias is None or bias.__class__ is nn.Parameter else None


# The loop


def _run_fast(
    layers: Sequence[HydraLayer], hidden_states: torch.Tensor, attention_mask, first_token_only: bool, **kwargs
) -> torch.Tensor:
    _, size, tokens, hidden = hidden_states.shape
    states = hidden_states.view(-1, size * tokens, hidden)
    few = are_few(size * tokens)
    batch = Batch(
        size,
        tokens,
        mask=attention_mask,
        is_causal=kwargs.get("is_causal") or False,
        has_few_rows=few,
        is_launch_bound=few and launches_take_longest(states),
        fills_up=zeros_cost_little(states),
    )
    parts = [fast_layer(layer) for layer in layers]
    # A layer that is called may keep what it is given: that has to be of the caller's mode.
    in_inference_mode = batch.is_launch_bound and None not in parts and not torch.is_inference_mode_enabled()
    with torch.inference_mode() if in_inference_mode else nullcontext():
        filled_up = fill_up(parts) if batch.fills_up else iter([None] * len(parts))
        for index, (layer, part) in enumerate(zip(layers, parts, strict=True), start=1):
            only_first = first_token_only and index == len(layers)
            filled = next(filled_up)
            if part is not None:
                run = norm_first_layer if layer.norm_first else norm_last_layer
                states = run(part, filled, states, batch, only_first)
                batch = batch._replace(tokens=1) if only_first else batch
            else:
                states = states.view(-1, batch.size, batch.tokens, hidden)
                states = layer(states, attention_mask, only_first, **kwargs)
                batch = batch._replace(size=states.shape[1], tokens=states.shape[2])
                states = states.flatten(1, 2)
            filled = None  # or it would be kept while the next is made
    states = states.clone() if in_inference_mode else states
    return states.view(states.shape[0], batch.size, batch.tokens, hidden)


def launches_take_longest(states: torch.Tensor) -> bool:
    """Whether launching the kernels for a few rows takes longer than running them: a GPU with 16-bit numbers."""
    return states.is_cuda and states.element_size() == 2


def zeros_cost_little(states: torch.Tensor) -> bool:
    """Whether heads of zeros cost less than launching kernels for one member after the other."""
    return states.is_cuda and states.shape[1] < ROWS_TO_FILL_UP.get(states.dtype, 0)


# A layer


def norm_first_layer(
    layer: FastLayer, filled: Filled | None, states: torch.Tensor, batch: Batch, first_token_only: bool
) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); equations 4 to 7."""
    normed = _norm(layer.attention_norm, states, batch)
    total, normed = _attend_add_norm(layer, filled, layer.mlp_norm, normed, states, batch, first_token_only)
    return _mlp(layer, normed, batch).add_(total)


def norm_last_layer(
    layer: FastLayer, filled: Filled | None, states: torch.Tensor, batch: Batch, first_token_only: bool
) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); LayerNorms behind the sums."""
    _, states = _attend_add_norm(layer, filled, layer.attention_norm, states, states, batch, first_token_only)
    return _add_norm(layer.mlp_norm, states, _mlp(layer, states, batch), batch)[1]


def _attend_add_norm(
    layer: FastLayer,
    filled: Filled | None,
    norm: nn.LayerNorm,
    states: torch.Tensor,
    residual: torch.Tensor,
    batch: Batch,
    first_token_only: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + attention(states)` and `norm(total)`: twice (members, rows or batch, hidden)."""
    (weight, bias), (output_weight, output_bias) = layer.qkv, layer.o
    members, hidden = output_bias.shape
    if first_token_only:
        residual = _first_tokens(residual, batch)
    if states.shape[0] < members:
        states = states.expand(members, -1, -1)
    if filled is not None:
        weight, bias, output_weight = filled
    elif layer.is_uniform:
        weight, output_weight = weight.view(members, -1, hidden), output_weight.view(members, -1, hidden)
        bias = None if bias is None else bias.view(members, 1, -1)
    else:
        branch = _one_member_after_the_other(layer, states, batch, first_token_only)
        return _add_norm(norm, residual, branch, batch)
    heads = _heads(layer.attention, weight, bias, states, batch, first_token_only)
    output_bias = output_bias.unsqueeze(1)
    if not batch.has_few_rows:
        return _add_norm(norm, residual, _product(heads, output_weight, output_bias), batch)
    total = (residual + output_bias).baddbmm_(heads, output_weight)
    return total, _norm(norm, total, batch)


def _one_member_after_the_other(
    layer: FastLayer, states: torch.Tensor, batch: Batch, first_token_only: bool
) -> torch.Tensor:
    """The attention of members that keep different numbers of heads: (members, rows, hidden) -> (members, rows or batch,
    hidden)"""
    members, rows, hidden = states.shape
    widths, (weight, bias), (output_weight, output_biases) = layer.widths, layer.qkv, layer.o
    joint_widths = [3 * width for width in widths]
    weights, output_weights = weight.split(joint_widths), output_weight.split(widths)
    biases = [None] * members if bias is None else bias.view(1, 1, -1).split(joint_widths, dim=2)
    output = states.new_empty(members, batch.size if first_token_only else rows, hidden)
    for m, output_bias in enumerate(output_biases):
        if widths[m] == 0:
            output[m] = output_bias
            continue
        own = weights[m].unsqueeze(0), biases[m], states[m : m + 1]
        heads = _heads(layer.attention, *own, batch, first_token_only)
        torch.addmm(output_bias, heads[0], output_weights[m], out=output[m])
    return output


def _heads(
    attention: HydraAttention,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    states: torch.Tensor,
    batch: Batch,
    first_token_only: bool,
) -> torch.Tensor:
    """What the heads of members with equally many of them give: (members, rows, hidden) -> (members, rows or batch,
    width)

    weight, bias: of q, k and v together, (members, 3 * width, hidden) and (members, 1, 3 * width)
    """
    members, mask, tokens, head_dim = states.shape[0], batch.mask, batch.tokens, attention.head_dim
    weight = weight.transpose(1, 2)

    def split(projected: torch.Tensor, tokens: int, projections: int) -> tuple[torch.Tensor, ...]:
        return split_heads(projected.view(members * batch.size, tokens, -1), projections, head_dim)

    if first_token_only and not batch.is_launch_bound:
        q, kv = slice(weight.shape[2] // 3), slice(weight.shape[2] // 3, None)
        query = _product(_first_tokens(states, batch), weight[..., q], None if bias is None else bias[..., q])
        joint = _product(states, weight[..., kv], None if bias is None else bias[..., kv])
        query, key, value = *split(query, 1, 1), *split(joint, tokens, 2)
    else:
        query, key, value = split(_product(states, weight, bias), tokens, 3)
    if mask is not None:
        mask = mask[: members * batch.size]
    if first_token_only:
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


# Members of different widths, filled up


def fill_up(layers: Sequence[FastLayer | None]) -> Iterator[Filled | None]:
    """Each layer's weights, made when they are needed and not kept; None for a layer that needs no filling."""
    ragged = [layer for layer in layers if layer is not None and not layer.is_uniform]
    biases = iter(_filled_biases(ragged))
    for layer in layers:
        yield None if layer is None or layer.is_uniform else _filled(layer, next(biases))


def _filled(layer: FastLayer, bias: torch.Tensor | None) -> Filled:
    qkv, o, widest = layer.qkv[0], layer.o[0], max(layer.widths)
    stacked = torch.cat((qkv, o, _zeros(qkv.shape[1], qkv.dtype, qkv.device)))
    rows = _filled_rows((layer.widths,), True, qkv.device)
    filled = stacked.index_select(0, rows).view(len(layer.widths), 4 * widest, -1)
    weight, output_weight = filled.split((3 * widest, widest), dim=1)
    return Filled(weight, bias, output_weight)


def _filled_biases(layers: Sequence[FastLayer]) -> list[torch.Tensor | None]:
    """The biases of q, k and v of all layers at once: per layer (members, 1, 3 * widest)."""
    if not layers or layers[0].qkv[1] is None:
        return [None] * len(layers)
    first, widths = layers[0].qkv[1], tuple(layer.widths for layer in layers)
    stacked = torch.cat([*(layer.qkv[1] for layer in layers), _zeros(1, first.dtype, first.device)[0]])
    filled = stacked.index_select(0, _filled_rows(widths, False, first.device))
    sizes = [3 * len(own) * max(own) for own in widths]
    return [bias.view(len(own), 1, -1) for own, bias in zip(widths, filled.split(sizes), strict=True)]


@lru_cache(maxsize=128)
def _filled_rows(
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
