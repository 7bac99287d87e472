"""A model's layers in plain inference, computed from their parameters without a call of any module.

At small batches calling modules and launching kernels takes longer than computing. `run_layers` therefore computes what
the layers' own `forward` computes, with few launches:

- q, k and v of all members are one product; their weights are laid side by side for a few layers at once, their biases
  for all;
- the output projection is added onto the residual sum where that lies, without a pass of its own;
- where launches decide, all of it happens in inference mode, which takes a tenth off every call, and only the result is
  copied out of it;
- members that keep different numbers of heads run side by side all the same: on a GPU, unless rows are many, heads of
  zeros fill up those that keep fewer. Otherwise one member runs after the other, which copies nothing between them.

A layer runs bare only where a module call could mean nothing else: without hooks, adapters, offloaded weights, parts
that members do not share, other attention backends, training. All other layers are called as modules.

States are (members or 1, rows, hidden) here; a row is a token of the batch.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.nn.modules.module import _has_any_global_hook

from .attention import HydraAttention, HydraMLP, has_rows, mask_of_first_token, split_heads
from .ensembling import batch_first, wants_hidden_states
from .grouped import GroupedLinear, GroupedOutput, are_few, grouped_product
from .kernels import activate, add_and_layer_norm, layer_norm
from .shortcuts import is_bare, is_plain_inference


# From this many rows per member on, a GPU is busy for longer with heads of zeros than it takes to launch kernels for one
# member after the other.
ROWS_TO_FILL_UP = {torch.float16: 8192, torch.bfloat16: 8192, torch.float32: 2048}

# Where launches decide, this many layers' weights are joined by one: more would hold more memory for ever less.
LAYERS_JOINED_AT_ONCE = 4

WeightAndBias = tuple[torch.Tensor, torch.Tensor | None]


class BareLayer(NamedTuple):
    """What a layer computes with."""

    attention: HydraAttention
    q: WeightAndBias
    k: WeightAndBias
    v: WeightAndBias
    o: WeightAndBias
    fc1: WeightAndBias
    activation: nn.Module
    fc2: WeightAndBias
    first_norm: nn.LayerNorm
    second_norm: nn.LayerNorm


class Joint(NamedTuple):
    """What a layer's attention multiplies with and adds, each member's rows together.

    weight, bias: of q, k and v, (members, 3 * width, hidden) and (members, 1, 3 * width)
    output_weight: of o, (members, width, hidden)

    Where widths differ and are not filled up, all members are one block: (3 * sum of widths, hidden), (1, 1, 3 * sum of
    widths) and (sum of widths, hidden).
    """

    weight: torch.Tensor
    output_weight: torch.Tensor
    bias: torch.Tensor | None


class Batch(NamedTuple):
    """How the rows of the states came about, and what decides on how to compute them."""

    size: int
    tokens: int
    mask: torch.Tensor | None  # (members * batch, ...), what `encoder_mask` or `members_mask` returns
    is_causal: bool
    has_few_rows: bool
    is_launch_bound: bool
    fills_up: bool  # whether heads of zeros fill up members that keep fewer heads than others


def run_layers(
    model: nn.Module,
    hidden_states: torch.Tensor,
    attention_mask=None,
    first_token_only: bool = False,
    **kwargs,
) -> torch.Tensor:
    """All layers of an encoder in turn: (members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden).

    model: has `layers`, whose class names its two LayerNorms in `norms` and says `is_pre_norm`, and `recorded_states`
    attention_mask: what `encoder_mask` or `members_mask` returns
    first_token_only: let the last layer compute the first token alone
    kwargs: for layers that run as modules; `is_causal` counts for all
    """
    layers = list(model.layers)
    if wants_hidden_states(model.config, kwargs):
        return run_recorded(model, hidden_states, attention_mask, first_token_only, **kwargs)
    if not can_run_bare(model, hidden_states, attention_mask):
        for index, layer in enumerate(layers, start=1):
            only_first = first_token_only and index == len(layers)
            hidden_states = layer(hidden_states, attention_mask, only_first, **kwargs)
        return hidden_states

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
    parts = [bare_layer(layer) for layer in layers]
    # A layer that is called as a module may keep what it is given: that has to be of the caller's mode.
    in_inference_mode = batch.is_launch_bound and None not in parts and not torch.is_inference_mode_enabled()
    with (
        quick_attention() if batch.is_launch_bound and is_alone() else nullcontext(),
        torch.inference_mode() if in_inference_mode else nullcontext(),
    ):
        in_turn = joined_in_turn(parts, batch)
        for index, (layer, bare) in enumerate(zip(layers, parts, strict=True), start=1):
            only_first = first_token_only and index == len(layers)
            joint = next(in_turn)
            if bare is None:
                states = states.view(-1, batch.size, batch.tokens, hidden)
                states = layer(states, attention_mask, only_first, **kwargs)
                batch = batch._replace(size=states.shape[1], tokens=states.shape[2])
                states = states.flatten(1, 2)
            elif layer.is_pre_norm:
                states = pre_norm_layer(bare, joint, states, batch, only_first)
            else:
                states = post_norm_layer(bare, joint, states, batch, only_first)
            joint = None  # or it would be kept while the next ones are made
    states = states.clone() if in_inference_mode else states
    return states.view(states.shape[0], batch.size, -1, hidden)


def run_recorded(
    model: nn.Module, hidden_states: torch.Tensor, attention_mask, first_token_only: bool, **kwargs
) -> torch.Tensor:
    """`run_layers` where hidden states are recorded."""
    states = batch_first(hidden_states, model.num_members)
    for index, layer in enumerate(model.layers, start=1):
        only_first = first_token_only and index == len(model.layers)
        output = layer(states.transpose(0, 1), attention_mask, only_first, **kwargs)
        states = model.recorded_states(states, output.transpose(0, 1))
    return states.transpose(0, 1)


def launches_take_longest(states: torch.Tensor) -> bool:
    """Whether launching the kernels for a few rows takes longer than running them: a GPU with 16-bit numbers."""
    return states.is_cuda and states.element_size() == 2


def zeros_cost_little(states: torch.Tensor) -> bool:
    """Whether heads of zeros cost less than launching kernels for one member after the other."""
    return states.is_cuda and states.shape[1] < ROWS_TO_FILL_UP.get(states.dtype, 0)


def is_alone() -> bool:
    """Whether this is the only thread: the choice of attention kernels is the whole process's."""
    return threading.active_count() == 1


@contextmanager
def quick_attention():
    """Leaves out the attention kernels that take longest to launch, cuDNN's and flash attention, unless they were all
    that the user wants."""
    backends = torch.backends.cuda
    switches = (
        (backends.cudnn_sdp_enabled(), backends.enable_cudnn_sdp),
        (backends.flash_sdp_enabled(), backends.enable_flash_sdp),
    )
    switches = [switch for is_on, switch in switches if is_on and backends.mem_efficient_sdp_enabled()]
    try:
        for switch in switches:
            switch(False)
        yield
    finally:
        for switch in switches:
            switch(True)


def can_run_bare(model: nn.Module, hidden_states: torch.Tensor, attention_mask) -> bool:
    """Whether layers may run bare on these states, whatever the single layer says."""
    return (
        is_plain_inference(hidden_states)
        and not model.training
        and hidden_states.is_contiguous()
        and hidden_states.numel() > 0
        and has_rows(attention_mask)
        and model.config._attn_implementation == "sdpa"
        and not _has_any_global_hook()
    )


def bare_layer(layer: nn.Module) -> BareLayer | None:
    """The parts of a layer, if it is made of them and nothing else."""
    # A wrapper has no norms of its own, and a subclass may compute something else.
    if "norms" not in vars(layer.__class__) or not is_bare(layer, layer.__class__):
        return None
    # The modules' own dictionaries: attribute access on modules takes a search through three of them each time.
    modules = layer._modules
    attention, mlp, dropout = modules["attention"], modules["mlp"], modules.get("dropout")
    if not (is_bare(attention, HydraAttention) and is_bare(mlp, HydraMLP)):
        return None
    # Someone may have switched single dropouts on, to sample from them.
    if dropout is not None and (dropout.training or not is_bare(dropout, nn.Dropout)):
        return None
    if layer.training or attention.training:
        return None
    if attention.has_no_head:
        return None
    q, k, v, o = map(attention._modules.__getitem__, ("q_proj", "k_proj", "v_proj", "o_proj"))
    fc1, activation, fc2 = map(mlp._modules.__getitem__, ("fc1", "activation_fn", "fc2"))
    first_norm, second_norm = modules[layer.norms[0]], modules[layer.norms[1]]
    if not (
        is_bare(q, GroupedLinear)
        and is_bare(k, GroupedLinear)
        and is_bare(v, GroupedLinear)
        and is_bare(o, GroupedOutput)
        and is_bare(fc1, nn.Linear)
        and is_bare(activation, activation.__class__)
        and is_bare(fc2, nn.Linear)
        and is_bare(first_norm, nn.LayerNorm)
        and is_bare(second_norm, nn.LayerNorm)
    ):
        return None
    try:
        q, k, v, o, fc1, fc2, _, _ = [
            (part._parameters["weight"], part._parameters["bias"])
            for part in (q, k, v, o, fc1, fc2, first_norm, second_norm)
        ]
    except KeyError:  # a weight that is computed from others, as in `torch.nn.utils.prune`
        return None
    return BareLayer(attention, q, k, v, o, fc1, activation, fc2, first_norm, second_norm)


def pre_norm_layer(
    layer: BareLayer, joint: Joint, states: torch.Tensor, batch: Batch, first_token_only: bool
) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); equations 4 to 7."""
    normed = _norm(layer.first_norm, states, batch)
    total, normed = _attend_add_norm(layer, joint, layer.second_norm, normed, states, batch, first_token_only)
    return _mlp(layer, normed, batch).add_(total)


def post_norm_layer(
    layer: BareLayer, joint: Joint, states: torch.Tensor, batch: Batch, first_token_only: bool
) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members, rows or batch, hidden); LayerNorms behind the sums."""
    _, states = _attend_add_norm(layer, joint, layer.first_norm, states, states, batch, first_token_only)
    return _add_norm(layer.second_norm, states, _mlp(layer, states, batch), batch)[1]


def _attend_add_norm(
    layer: BareLayer,
    joint: Joint,
    norm: nn.LayerNorm,
    states: torch.Tensor,
    residual: torch.Tensor,
    batch: Batch,
    first_token_only: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + attention(states)` and `norm(total)`: twice (members, rows or batch, hidden)."""
    attention, output_bias = layer.attention, layer.o[1].unsqueeze(1)
    members = attention.num_members
    if first_token_only:
        residual = _first_tokens(residual, batch)
    if states.shape[0] < members:
        states = states.expand(members, -1, -1)
    if not (attention.is_uniform or batch.fills_up):
        branch = _one_member_after_the_other(layer, joint, states, batch, first_token_only)
        return _add_norm(norm, residual, branch, batch)
    heads = _heads(attention, joint.weight, joint.bias, states, batch, first_token_only)
    if not batch.has_few_rows:
        return _add_norm(norm, residual, grouped_product(heads, joint.output_weight, output_bias), batch)
    total = (residual + output_bias).baddbmm_(heads, joint.output_weight)
    return total, _norm(norm, total, batch)


def _one_member_after_the_other(
    layer: BareLayer, joint: Joint, states: torch.Tensor, batch: Batch, first_token_only: bool
) -> torch.Tensor:
    """The attention of members that keep different numbers of heads: (members, rows, hidden) -> (members, rows or batch,
    hidden)"""
    members, rows, hidden = states.shape
    widths = layer.attention.widths
    joint_widths = [3 * width for width in widths]
    weights, output_weights = joint.weight.split(joint_widths), joint.output_weight.split(widths)
    biases = [None] * members if joint.bias is None else joint.bias.split(joint_widths, dim=2)
    output = states.new_empty(members, batch.size if first_token_only else rows, hidden)
    for m, output_bias in enumerate(layer.o[1]):
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
    if first_token_only and not batch.is_launch_bound:
        q, kv = slice(weight.shape[2] // 3), slice(weight.shape[2] // 3, None)
        query = grouped_product(_first_tokens(states, batch), weight[..., q], None if bias is None else bias[..., q])
        joint = grouped_product(states, weight[..., kv], None if bias is None else bias[..., kv])
        query, key, value = *split_heads(query, 1, 1, head_dim), *split_heads(joint, tokens, 2, head_dim)
    else:
        query, key, value = split_heads(grouped_product(states, weight, bias), tokens, 3, head_dim)
    if mask is not None:
        mask = mask[: members * batch.size]
    if first_token_only:
        query, mask, tokens = query[:, :, :1], mask_of_first_token(mask), 1
    is_causal = batch.is_causal and mask is None and tokens > 1
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=attention.scaling, is_causal=is_causal
    )
    return output.transpose(1, 2).reshape(members, batch.size * tokens, -1)


def _first_tokens(states: torch.Tensor, batch: Batch) -> torch.Tensor:
    """(members or 1, rows, hidden) -> (members or 1, batch, hidden)"""
    return states.view(-1, batch.size, batch.tokens, states.shape[-1])[:, :, 0]


def _mlp(layer: BareLayer, states: torch.Tensor, batch: Batch) -> torch.Tensor:
    inner = linear(states, *layer.fc1)
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


# Weights and biases, member by member


def joined_in_turn(layers: list[BareLayer | None], batch: Batch) -> Iterator[Joint | None]:
    """Each layer's, made when it is needed and not kept; None for a layer that is called as a module."""
    at_once = LAYERS_JOINED_AT_ONCE if batch.is_launch_bound else 1
    biases, start = joint_biases(layers, batch.fills_up), 0
    while start < len(layers):
        first = layers[start]
        if first is None or not first.attention.is_uniform:
            yield None if first is None else Joint(*ragged_weights(first, batch.fills_up), biases[start])
            start += 1
            continue
        widths, end = first.attention.widths, start + 1
        while end < min(start + at_once, len(layers)) and _has_widths(layers[end], widths):
            end += 1
        yield from joined_at_once(layers[start:end], biases[start:end])
        start = end


def _has_widths(layer: BareLayer | None, widths: tuple[int, ...]) -> bool:
    return layer is not None and layer.attention.widths == widths


def joined_at_once(layers: list[BareLayer], biases: list[torch.Tensor | None]) -> Iterator[Joint]:
    """Those of layers in which all members keep the same number of heads, by one launch."""
    m, w = len(layers[0].attention.widths), layers[0].attention.widths[0]
    hidden = layers[0].o[0].shape[1]
    blocks = [weight.view(m, w, hidden) for layer in layers for weight, _ in (layer.q, layer.k, layer.v)]
    joint = torch.cat(blocks, 1).split(3 * w, 1)
    for index, layer in enumerate(layers):
        yield Joint(joint[index], layer.o[0].view(m, w, hidden), biases[index])


def ragged_weights(layer: BareLayer, fill_up: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a layer whose members keep different numbers of heads, of q, k and v together and of o: filled up to
    the widest, or packed."""
    q, k, v, o = layer.q[0], layer.k[0], layer.v[0], layer.o[0]
    widths, hidden = layer.attention.widths, o.shape[1]
    if not fill_up:
        return torch.cat((q, k, v)).index_select(0, _rows((widths,), 3, False, q.device)), o
    widest = max(widths)
    stacked = torch.cat((q, k, v, o, _zeros(hidden, q.dtype, q.device)))
    filled = stacked.index_select(0, _rows((widths,), 4, True, q.device)).view(len(widths), 4 * widest, hidden)
    return filled.split((3 * widest, widest), dim=1)


def joint_biases(layers: list[BareLayer | None], fill_up: bool) -> list[torch.Tensor | None]:
    """The biases of q, k and v of all layers, each member's together: per layer (members, 1, 3 * width), or (1, 1, 3 *
    sum of widths) where widths differ and are not filled up."""
    bare = [layer for layer in layers if layer is not None]
    stacked = [bias for layer in bare for _, bias in (layer.q, layer.k, layer.v)]
    if not bare or stacked[0] is None:
        return [None] * len(layers)
    first, widths = stacked[0], tuple(layer.attention.widths for layer in bare)
    if fill_up:
        stacked.append(_zeros(1, first.dtype, first.device)[0])
    joint = torch.cat(stacked).index_select(0, _rows(widths, 3, fill_up, first.device))
    if len(set(widths)) == 1 and bare[0].attention.is_uniform:
        biases = joint.view(len(bare), len(widths[0]), 1, -1).unbind(0)
    else:
        sizes = [3 * (len(own) * max(own) if fill_up else sum(own)) for own in widths]
        blocks = [
            len(own) if fill_up or layer.attention.is_uniform else 1 for layer, own in zip(bare, widths, strict=True)
        ]
        biases = [bias.view(count, 1, -1) for bias, count in zip(joint.split(sizes), blocks, strict=True)]
    biases = iter(biases)
    return [None if layer is None else next(biases) for layer in layers]


@lru_cache(maxsize=128)
def _rows(
    widths_of_layers: tuple[tuple[int, ...], ...], projections: int, fill_up: bool, device: torch.device
) -> torch.Tensor:
    """Where the rows of each member lie in stacked projections of layers: layer by layer, member by member, projection
    by projection; filled up to the widest member of the layer with the row of zeros behind them all."""
    zero, start, rows = projections * sum(map(sum, widths_of_layers)), 0, []
    for widths in widths_of_layers:
        for m, width in enumerate(widths):
            for projection in range(projections):
                first = start + projection * sum(widths) + sum(widths[:m])
                rows += range(first, first + width)
                rows += [zero] * (max(widths) - width if fill_up else 0)
        start += projections * sum(widths)
    return torch.tensor(rows, device=device)


@lru_cache(maxsize=64)
def _zeros(columns: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(1, columns, dtype=dtype, device=device)
