"""Norms and activations in one pass over the GPU's memory, for large batches on the fast way (`layers`).

Each function has its plain form beside the Triton one and gives its result to float tolerance. The Triton form runs on
CUDA with enough rows to pay for its launch; small batches, CPUs and machines without Triton take the plain form.
"""

import math

import torch
from torch import nn
from transformers.activations import QuickGELUActivation


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Below this many elements the launch of a Triton kernel takes longer than it saves. Products of float32 take long enough
# to launch kernels meanwhile.
ELEMENTS_WORTH_A_KERNEL = {torch.float16: 3 * 2**22, torch.bfloat16: 3 * 2**22, torch.float32: 2**20}
# A row of states must fit one program.
MOST_COLUMNS = 4096


def is_worth_a_kernel(like: torch.Tensor, elements: int) -> bool:
    """Whether a kernel pays for a tensor of so many elements, of the type and on the device of another."""
    return like.is_cuda and elements >= ELEMENTS_WORTH_A_KERNEL.get(like.dtype, math.inf) and triton is not None


def can_use_kernel(tensor: torch.Tensor) -> bool:
    return is_worth_a_kernel(tensor, tensor.numel()) and tensor.is_contiguous()


def add_and_layer_norm(
    norm: nn.LayerNorm,
    residual: torch.Tensor,
    branch: torch.Tensor,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = residual + branch + before`: returns `total + after` and `norm(total)`, (members, rows, hidden) each.

    residual: (members or 1, rows, hidden)
    branch: (members, rows, hidden); it may be overwritten
    before: (members, hidden) or (members, 1, hidden)
    after: (hidden,). Both are biases that the products on either side leave out: adding one to a batch of products takes a
        pass of its own
    """
    total, normed = _normed_in_one_pass(norm, branch, residual, before, after)
    if normed is None:
        total = branch.add_(residual)
        total = total if before is None else total.add_(before.view(-1, 1, before.shape[-1]))
        normed = norm(total)
        total = total if after is None else total.add_(after)
    return total, normed


def layer_norm(norm: nn.LayerNorm, states: torch.Tensor, before: torch.Tensor | None = None) -> torch.Tensor:
    """`norm(states + before)`, (members, rows, hidden); `before` (1, hidden)"""
    normed = _normed_in_one_pass(norm, states, before=before)[1]
    if normed is None:
        normed = norm(states if before is None else states + before)
    return normed


def _normed_in_one_pass(
    norm: nn.LayerNorm,
    states: torch.Tensor,
    residual: torch.Tensor | None = None,
    before: torch.Tensor | None = None,
    after: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What `add_and_layer_norm` returns, its first part written over `states`; None for the second where the kernel cannot
    do it. Without a residual, nothing is written over `states`."""
    columns = states.shape[-1]
    parameters = [norm.weight, norm.bias, *(each for each in (residual, before, after) if each is not None)]
    can_fuse = (
        can_use_kernel(states)
        and columns <= MOST_COLUMNS
        and all(each is not None and each.dtype == states.dtype and each.is_contiguous() for each in parameters)
    )
    if not can_fuse:
        return states, None
    normed, rows, block_rows = torch.empty_like(states), states.numel() // columns, 4
    tensors = [states if each is None else each for each in (residual, before, after)]
    # Of how many rows the residual is, which starts again where they end, and to how many rows a bias of `before` is added.
    residual_rows = rows if residual is None else residual.numel() // columns
    rows_per_bias = rows if before is None else rows // (before.numel() // columns)
    _layer_norm_kernel[(triton.cdiv(rows, block_rows),)](
        states,
        *tensors,
        normed,
        norm.weight,
        norm.bias,
        rows,
        columns,
        residual_rows,
        rows_per_bias,
        norm.eps,
        HAS_RESIDUAL=residual is not None,
        HAS_BEFORE=before is not None,
        HAS_AFTER=after is not None,
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=triton.next_power_of_2(columns),
        num_warps=4,
    )
    return states, normed


def activate(activation: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """`activation(hidden_states)`; CLIP's quick GELU, three kernels otherwise, overwrites `hidden_states` in one."""
    if isinstance(activation, QuickGELUActivation) and can_use_kernel(hidden_states):
        elements = hidden_states.numel()
        _quick_gelu_kernel[(triton.cdiv(elements, 8192),)](hidden_states, elements, BLOCK=8192, num_warps=8)
        return hidden_states
    return activation(hidden_states)


if triton is not None:

    @triton.jit
    def _layer_norm_kernel(
        states,
        residual,
        before,
        after,
        normed,
        weight,
        bias,
        rows,
        columns,
        residual_rows,
        rows_per_bias,
        epsilon,
        HAS_RESIDUAL: tl.constexpr,
        HAS_BEFORE: tl.constexpr,
        HAS_AFTER: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        column = tl.arange(0, BLOCK_COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        where = row * columns + column
        x = tl.load(states + where, mask=inside, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual + (row % residual_rows) * columns + column, mask=inside, other=0.0).to(tl.float32)
        if HAS_BEFORE:
            x += tl.load(before + (row // rows_per_bias) * columns + column, mask=inside, other=0.0).to(tl.float32)
        x = x.to(normed.dtype.element_ty).to(tl.float32)
        if HAS_RESIDUAL:
            total = x
            if HAS_AFTER:
                total += tl.load(after + column, mask=column < columns, other=0.0).to(tl.float32)
            tl.store(states + where, total.to(normed.dtype.element_ty), mask=inside)
        mean = tl.sum(x, axis=1)[:, None] / columns
        centred = tl.where(inside, x - mean, 0.0)
        variance = tl.sum(centred * centred, axis=1)[:, None] / columns
        scale = tl.load(weight + column, mask=column < columns, other=0.0).to(tl.float32)
        shift = tl.load(bias + column, mask=column < columns, other=0.0).to(tl.float32)
        result = centred * tl.rsqrt(variance + epsilon) * scale + shift
        tl.store(normed + where, result.to(normed.dtype.element_ty), mask=inside)

    @triton.jit
    def _quick_gelu_kernel(states, elements, BLOCK: tl.constexpr):
        where = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = where < elements
        x = tl.load(states + where, mask=inside, other=0.0).to(tl.float32)
        tl.store(states + where, (x * tl.sigmoid(1.702 * x)).to(states.dtype.element_ty), mask=inside)
