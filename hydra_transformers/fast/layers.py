"""The fast way through the layers: plain inference without a call of any module.

At small batches calling modules and launching kernels takes longer than computing, at large ones passes over the memory do.
The fast way

- adds each branch onto the residual sum inside of its last product;
- runs members with different numbers of heads side by side: on a GPU, unless rows are many, heads of zeros fill up those
  that keep fewer. Otherwise one member runs after the other, which copies nothing between them;
- takes norms of large batches in one pass (`kernels`).

A layer whose parts are hooked, replaced, adapted, offloaded, quantised, in training or not shared is called as a module.
`HYDRA_FAST_INFERENCE=0` in the environment, or `fast_inference=False` in the config, switches the fast way off.

States are (members or 1, rows, hidden) here; a row is a token of the batch.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention

from ..models import modeling_hydra
from ..models.modeling_hydra import (
    GroupedLinear,
    GroupedOutput,
    HydraAttention,
    HydraLayer,
    HydraMLP,
    has_rows,
    is_exporting,
    mask_of_first_token,
)
from .kernels import activate, add_and_layer_norm, is_worth_a_kernel, layer_norm


# From this many rows per member on, a GPU is busy for longer with heads of zeros than it takes to launch kernels for one
# member after the other.
ROWS_TO_FILL_UP = {torch.float16: 8192, torch.bfloat16: 8192, torch.float32: 2048}

# Where launches take longest, the weights of this many layers are filled up at once.
LAYERS_TO_FILL_UP = 4

# Arguments of layers that change nothing here, but for `is_causal`, which is passed on.
KNOWN = {"is_causal", "num_items_in_batch", "output_attentions", "output_hidden_states", "return_dict", "use_cache"}

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


def can_run_fast(
    layers: Sequence[nn.Module], states: torch.Tensor, attention_mask: Any, kwargs: Mapping[str, Any]
) -> bool:
    """Whether layers may run fast on these states: no gradients, autocast, compilation, export, tracing, function
    transforms, global hooks, nor modes that change or count operations."""
    config = layers[0].attention.config if layers and isinstance(layers[0], HydraLayer) else None
    return (
        config is not None
        and not torch.is_grad_enabled()
        and config.fast_inference
        and os.environ.get("HYDRA_FAST_INFERENCE", "1") != "0"
        and config._attn_implementation == "sdpa"
        and states.__class__ is torch.Tensor  # subclasses may override any operation
        and not states.is_meta
        and not torch.is_autocast_enabled(states.device.type)
        and not torch.compiler.is_compiling()
        and not is_exporting()
        and not has_modes_or_hooks()
        and states.is_contiguous()
        and states.numel() > 0
        and has_rows(attention_mask)
        and not isinstance(attention_mask, Mapping)  # one for each type of layers
        and all(value is None or name in KNOWN for name, value in kwargs.items())
    )


def has_modes_or_hooks() -> bool:
    """Whether every module is hooked, or operations do more than compute: fake tensors, counters, vmap and its kin, forward-mode
    derivatives, modes of torch functions (but for the default device)."""
    try:
        modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        return (
            torch.nn.modules.module._has_any_global_hook()
            or any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.maybe_current_level() is not None
            or torch.autograd.forward_ad._current_level >= 0
        )
    except AttributeError:  # a private function that this version of torch does not have
        return True


class FastLayer(NamedTuple):
    """What a layer computes with.

    qkv, o: where several members have one width (members, hidden, 3 * width) and (members, 1, 3 * width), and (members,
        width, hidden) and (members, 1, hidden); otherwise packed, as the modules have them
    """

    attention: HydraAttention
    widths: tuple[int, ...]
    is_uniform: bool
    qkv: WeightAndBias
    o: WeightAndBias
    fc1: WeightAndBias
    fc2: WeightAndBias
    activation: nn.Module
    has_gate: bool
    attention_norm: nn.LayerNorm
    mlp_norm: nn.LayerNorm


# The parts of a layer that runs fast, by name: of these very classes. An activation may be of any class.
KINDS = {
    "attention_norm": nn.LayerNorm,
    "attention": HydraAttention,
    "attention.qkv_proj": GroupedLinear,
    "attention.o_proj": GroupedOutput,
    "mlp_norm": nn.LayerNorm,
    "mlp": HydraMLP,
    "mlp.fc1": nn.Linear,
    "mlp.activation_fn": None,
    "mlp.fc2": nn.Linear,
}
DROPOUTS = ("output_dropout", "mlp_dropout", "mlp.dropout")

# The parts that a layer had when it first ran: (the parent's children, name, part, its class, its attributes)
Part = tuple[dict[str, nn.Module], str, nn.Module, type, dict[str, Any]]
_parts_of_layers: WeakKeyDictionary[nn.Module, tuple[Part, ...] | None] = WeakKeyDictionary()


def fast_layer(layer: nn.Module) -> FastLayer | None:
    """The weights of a layer, if it is made of known parts and nothing happens around their forward."""
    parts = _parts_of_layers.get(layer)
    if parts is None or not are_untouched(layer, parts):
        parts = _parts_of_layers[layer] = find_parts(layer)
        if parts is None or not are_untouched(layer, parts):
            return None
    attention_norm, attention, qkv, o, mlp_norm, mlp, fc1, activation, fc2 = (part[2] for part in parts[:9])
    parameters = [weight_and_bias(part) for part in (qkv, o, fc1, fc2, attention_norm, mlp_norm)]
    if None in parameters or attention.has_no_head or attention.queries_per_key > 1 or attention.is_causal:
        return None
    if any(part[1] is None for part in (parameters[1], *parameters[4:])):
        return None  # the sums and kernels below add biases of the output projection and the norms
    widths, maps = tuple(o.widths), parameters[:4]
    if o.is_uniform and len(widths) > 1:  # an axis for the members
        (weight, bias), (output_weight, output_bias), members = *maps[:2], len(widths)
        weight = weight.view(members, -1, weight.shape[1]).transpose(1, 2)
        maps[0] = weight, None if bias is None else bias.view(members, 1, -1)
        maps[1] = output_weight.view(members, -1, output_weight.shape[1]), output_bias.unsqueeze(1)
    return FastLayer(attention, widths, o.is_uniform, *maps, activation, mlp.has_gate, attention_norm, mlp_norm)


def find_parts(layer: nn.Module) -> tuple[Part, ...] | None:
    """None for a layer that is not made of them."""
    if layer.__class__ is not HydraLayer:
        return None
    for parent in ("", "attention", "mlp"):
        for name, child in layer.get_submodule(parent)._modules.items():
            if child is not None and f"{parent}.{name}".removeprefix(".") not in (*KINDS, *DROPOUTS):
                return None  # a part that is not computed here, such as a norm of queries
    parts = []
    for name in (*KINDS, *DROPOUTS):
        parent, _, own_name = name.rpartition(".")
        children = layer.get_submodule(parent)._modules
        part = children.get(own_name)
        if part is None and name in DROPOUTS:
            continue
        kind = KINDS.get(name, nn.Dropout) or part.__class__
        if part.__class__ is not kind:
            return None
        parts.append((children, own_name, part, kind, part.__dict__))
    return tuple(parts)


def are_untouched(layer: nn.Module, parts: tuple[Part, ...]) -> bool:
    """Whether all parts are in their places, in evaluation mode, without hooks, adapters or offloading in place of the
    forward of their class, and not compiled by themselves."""
    if layer.__class__ is not HydraLayer:
        return False
    for children, name, part, kind, state in (({"": layer}, "", layer, HydraLayer, layer.__dict__), *parts):
        if children.get(name) is not part or part.__class__ is not kind or state["training"]:
            return False
        if (
            state["_forward_hooks"]
            or state["_forward_pre_hooks"]
            or "forward" in state
            or "_compiled_call_impl" in state
        ):
            return False
    return True


def weight_and_bias(module: nn.Module) -> WeightAndBias | None:
    """A module's own parameters, as plain tensors; None where they are computed from others (`torch.nn.utils.prune`),
    missing, or of a kind of their own (quantised, distributed)."""
    parameters = module._parameters
    weight, bias = parameters.get("weight"), parameters.get("bias")
    if weight.__class__ is not nn.Parameter or "bias" not in parameters:
        return None
    return (weight, bias) if bias is None or bias.__class__ is nn.Parameter else None


# The loop


class Batch(NamedTuple):
    """How the rows of the states came about, and what decides on how to compute them."""

    size: int
    tokens: int
    mask: torch.Tensor | None  # (members * batch, ...), what `encoder_mask` or `members_mask` returns
    is_causal: bool
    has_few_rows: bool  # so that one product for all members is better than one for each
    is_launch_bound: bool
    is_large: bool = False  # so that elementwise work should be one pass
    first_token_only: bool = False  # let only the first token ask


def fast_layers(
    layers: Sequence[nn.Module], hidden_states: torch.Tensor, attention_mask: Any, first_token_only: bool, kwargs: dict
) -> torch.Tensor | None:
    """What `run_layers` returns, or None where it has to call the layers."""
    if not can_run_fast(layers, hidden_states, attention_mask, kwargs):
        return None
    _, size, tokens, hidden = hidden_states.shape
    states = hidden_states.view(-1, size * tokens, hidden)
    few = size * tokens < modeling_hydra.ROWS_FOR_ONE_PRODUCT_PER_MEMBER
    is_causal = kwargs.get("is_causal") or False
    batch = Batch(size, tokens, attention_mask, is_causal, few, few and launches_take_longest(states))
    parts = [fast_layer(layer) for layer in layers]
    if zeros_cost_little(states):
        parts = FilledUp(parts, LAYERS_TO_FILL_UP if batch.is_launch_bound else 1)
    for index, layer in enumerate(layers):
        part, only_first = parts[index], first_token_only and index == len(layers) - 1
        if part is None:
            states = states.view(-1, batch.size, batch.tokens, hidden)
            states = layer(states, attention_mask, only_first, **kwargs)
            batch = batch._replace(size=states.shape[1], tokens=states.shape[2])
            states = states.flatten(1, 2)
            continue
        is_large = is_worth_a_kernel(states, len(part.widths) * states.shape[1] * hidden)
        if (is_large, only_first) != (batch.is_large, batch.first_token_only):
            batch = batch._replace(is_large=is_large, first_token_only=only_first)
        states = (norm_first_layer if layer.norm_first else norm_last_layer)(part, states, batch)
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
    heads = _attend(layer, _norm(layer.attention_norm, states, batch), batch)
    total, normed = _project_add_norm(layer, layer.mlp_norm, heads, states, batch, after=layer.fc2[1])
    return _add_mlp(layer, total, normed, batch.is_launch_bound)


def norm_last_layer(layer: FastLayer, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); LayerNorms behind the sums."""
    heads = _attend(layer, states, batch)
    _, states = _project_add_norm(layer, layer.attention_norm, heads, states, batch)
    return _norm(layer.mlp_norm, _add_mlp(layer, states, states, batch.is_launch_bound), batch, layer.fc2[1])


Heads = torch.Tensor | list[torch.Tensor | None]


def _attend(layer: FastLayer, states: torch.Tensor, batch: Batch) -> Heads:
    """What the heads give: (members or 1, rows, hidden) -> (members, rows or batch, width), or where widths differ a (1, rows
    or batch, width) for each member, None without a head."""
    members = len(layer.widths)
    if states.shape[0] < members:
        states = states.expand(members, -1, -1)
    if layer.is_uniform:
        return _heads(layer.attention, *layer.qkv, states, batch)
    weight, bias = layer.qkv
    widths = [3 * width for width in layer.widths]
    weights, biases = weight.split(widths), [None] * members if bias is None else bias.split(widths)
    return [
        _heads(layer.attention, weights[m], biases[m], states[m : m + 1], batch) if width else None
        for m, width in enumerate(widths)
    ]


def _heads(
    attention: HydraAttention, weight: torch.Tensor, bias: torch.Tensor | None, states: torch.Tensor, batch: Batch
) -> torch.Tensor:
    """What the heads of members with equally many of them give: (members, rows, hidden) -> (members, rows or batch,
    width)

    weight, bias: of q, k and v together, (members, hidden, 3 * width) and (members, 1, 3 * width); of one member (3 * width,
        hidden) and (3 * width)
    """
    members, mask, tokens, rows = states.shape[0], batch.mask, batch.tokens, states.shape[0] * batch.size
    if batch.first_token_only and not batch.is_launch_bound:
        width = weight.shape[0 if weight.dim() == 2 else 2] // 3
        (queries, others), biases = weight.tensor_split([width], 0 if weight.dim() == 2 else 2), (None, None)
        biases = biases if bias is None else bias.tensor_split([width], -1)
        query = _product(_first_tokens(states, batch), queries, biases[0], batch)
        joint = _product(states, others, biases[1], batch)
        query = query.view(rows, 1, -1, attention.head_dim)
        key, value = joint.view(rows, tokens, 2, -1, attention.head_dim).unbind(2)
    else:
        joint = _product(states, weight, bias, batch)
        query, key, value = joint.view(rows, tokens, 3, -1, attention.head_dim).unbind(2)
    if mask is not None:
        mask = mask_of_first_token(mask[:rows]) if batch.first_token_only else mask[:rows]
    if batch.first_token_only:
        query, tokens = query[:, :1], 1
    is_causal = batch.is_causal and mask is None and tokens > 1
    output = _scaled_dot_product(query, key, value, mask, is_causal, attention.scaling, batch)
    return output.reshape(members, batch.size * tokens, -1)


def _scaled_dot_product(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
    scaling: float,
    batch: Batch,
) -> torch.Tensor:
    """(rows, tokens, heads, head_dim) each -> (rows, query tokens, heads, head_dim)"""
    quick = quickly_launched_attention() if batch.is_launch_bound and query.is_cuda and mask is None else None
    if quick is not None and query.shape[3] % 8 == 0:
        return quick(query, key, value, is_causal, scaling)
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling, is_causal=is_causal)
    return output.transpose(1, 2)


EFFICIENT_ATTENTION = getattr(getattr(torch.ops.aten, "_efficient_attention_forward", None), "default", None)


def quickly_launched_attention() -> Callable | None:
    """The attention kernel that takes least time to launch, which is not the one that torch would choose: (query, key, value,
    is_causal, scaling) -> output, (rows, tokens, heads, head_dim) each.

    None where the user has switched it off (`torch.nn.attention.sdpa_kernel`), or where it is not NVIDIA's.
    """
    if torch.version.hip is not None or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return None
    return None if EFFICIENT_ATTENTION is None else efficient_attention


def efficient_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scaling: float
) -> torch.Tensor:
    # No bias, one length for all, no dropout; a causal mask is number 1; no log-sum-exp.
    given = (None, None, None, None, None, 0.0, int(is_causal), False)
    return EFFICIENT_ATTENTION(query, key, value, *given, scale=scaling)[0]


def _product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """`grouped_product`, written where it belongs: (members, rows, in) -> (members, rows, out)"""
    if weight.dim() == 2:
        return linear(inputs, weight, bias)
    if bias is None:
        return torch.bmm(inputs, weight)
    if batch.has_few_rows:
        return torch.baddbmm(bias, inputs, weight)
    products = inputs.new_empty(*inputs.shape[:2], weight.shape[2])
    for own_bias, own_inputs, own_weight, product in zip(bias, inputs, weight, products, strict=True):
        torch.addmm(own_bias[0], own_inputs, own_weight, out=product)
    return products


def _project_add_norm(
    layer: FastLayer,
    norm: nn.LayerNorm,
    heads: Heads,
    residual: torch.Tensor,
    batch: Batch,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output projection and the sum: returns `total + after` and `norm(total)`, (members, rows or batch, hidden) each.

    residual: (members or 1, rows, hidden); after: (hidden,)
    """
    if batch.first_token_only:
        residual = _first_tokens(residual, batch)
    weight, bias = layer.o
    if layer.is_uniform and batch.is_large:
        return add_and_layer_norm(norm, residual, heads @ weight, before=bias, after=after)
    if not layer.is_uniform:
        branch = _one_member_after_the_other(heads, weight.split(layer.widths))
        return add_and_layer_norm(norm, residual, branch, before=bias, after=after)
    total = residual + bias
    if weight.dim() == 2:
        total.view(-1, weight.shape[1]).addmm_(heads.view(-1, weight.shape[0]), weight)
    elif batch.has_few_rows:
        total.baddbmm_(heads, weight)
    else:
        for own_total, own_heads, own_weight in zip(total, heads, weight, strict=True):
            own_total.addmm_(own_heads, own_weight)
    normed = _norm(norm, total, batch)
    return total if after is None else total.add_(after), normed


def _one_member_after_the_other(heads: list[torch.Tensor | None], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """The output projection of members of different widths, without its bias: (members, rows, hidden)"""
    like, hidden = next(own_heads for own_heads in heads if own_heads is not None), weights[0].shape[1]
    branch = like.new_empty(len(heads), like.shape[1], hidden)
    for own_branch, own_heads, own_weight in zip(branch, heads, weights, strict=True):
        if own_heads is None:
            own_branch.zero_()
        else:
            torch.mm(own_heads[0], own_weight, out=own_branch)
    return branch


def _add_mlp(layer: FastLayer, total: torch.Tensor, states: torch.Tensor, is_launch_bound: bool) -> torch.Tensor:
    """`total + MLP(states)` but for the last bias, written over `total`: (members, rows, hidden) each."""
    hidden = total.shape[2]
    inner = linear(states.view(-1, hidden), *layer.fc1)  # (rows, inner)
    if layer.has_gate:
        gate, inner = inner.chunk(2, dim=-1)
        inner = layer.activation.forward(gate) * inner
    elif is_launch_bound:
        inner = layer.activation.forward(inner)
    else:
        inner = activate(layer.activation, inner)
    total.view(-1, hidden).addmm_(inner, layer.fc2[0].t())
    return total


def _first_tokens(states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members or 1, batch, hidden)"""
    return states.view(-1, batch.size, batch.tokens, states.shape[-1])[:, :, 0]


def _norm(norm: nn.LayerNorm, states: torch.Tensor, batch: Batch, before: torch.Tensor | None = None) -> torch.Tensor:
    """`norm(states + before)`; `states` may be overwritten where there is a `before`, (hidden,)"""
    if batch.is_large:
        return layer_norm(norm, states, before)
    states = states if before is None else states.add_(before)
    parameters = norm._parameters
    return torch.layer_norm(states, norm.normalized_shape, parameters["weight"], parameters["bias"], norm.eps)


# Members of different widths, filled up with heads of zeros to the widest


class FilledUp:
    """Layers by number, those whose members have different widths filled up: `at_once` of them when the first of these is
    asked for, gone before the next are made."""

    def __init__(self, layers: Sequence[FastLayer | None], at_once: int):
        self.layers, self.at_once, self.made = layers, at_once, {}
        self.ragged = [number for number, layer in enumerate(layers) if layer is not None and not layer.is_uniform]
        self.biases = dict(zip(self.ragged, filled_up_biases([layers[n] for n in self.ragged]), strict=True))

    def __getitem__(self, number: int) -> FastLayer | None:
        if number not in self.biases:
            return self.layers[number]
        if number not in self.made:
            self.made = {}
            first = self.ragged.index(number)
            numbers = self.ragged[first : first + self.at_once]
            filled = filled_up([self.layers[n] for n in numbers], [self.biases[n] for n in numbers])
            self.made = dict(zip(numbers, filled, strict=True))
        return self.made.pop(number)


def filled_up(layers: Sequence[FastLayer], biases: Sequence[torch.Tensor | None]) -> list[FastLayer]:
    """Layers whose members have one width, with these biases of q, k and v."""
    like, widths = layers[0].qkv[0], tuple(layer.widths for layer in layers)
    weights = [weight for layer in layers for weight in (layer.qkv[0], layer.o[0])]
    stacked = torch.cat([*weights, _zeros(like.shape[1], like.dtype, like.device)])
    stacked = stacked.index_select(0, _filled_up_rows(widths, True, like.device))
    filled = []
    parts = stacked.split([4 * len(own) * max(own) for own in widths])
    for layer, own, part, bias in zip(layers, widths, parts, biases, strict=True):
        widest, members = max(own), len(own)
        qkv, o = part.view(members, 4 * widest, -1).split((3 * widest, widest), dim=1)
        qkv, o = (qkv.transpose(1, 2), bias), (o, layer.o[1].unsqueeze(1))
        filled.append(layer._replace(widths=(widest,) * members, is_uniform=True, qkv=qkv, o=o))
    return filled


def filled_up_biases(layers: Sequence[FastLayer]) -> list[torch.Tensor | None]:
    """The bias of q, k and v, (members, 1, 3 * widest), of each layer; of all at once."""
    biases = [layer.qkv[1] for layer in layers]
    if not biases or biases[0] is None:
        return biases
    widths, like = tuple(layer.widths for layer in layers), biases[0]
    stacked = torch.cat([*biases, _zeros(1, like.dtype, like.device)[0]])
    filled = stacked.index_select(0, _filled_up_rows(widths, False, like.device))
    filled = filled.split([3 * len(own) * max(own) for own in widths])
    return [bias.view(len(own), 1, -1) for own, bias in zip(widths, filled, strict=True)]


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
