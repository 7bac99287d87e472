"""Elementwise work in one pass over the GPU's memory, for large batches on the fast way (`fast_inference`).

Each function has its plain form beside the Triton one and gives its result to float tolerance. The Triton form runs on
CUDA with enough rows to pay for its launch; small batches, CPUs and machines without Triton take the plain form.
"""

import math

import torch
from torch import nn
from transformers.activations import GELUActivation, QuickGELUActivation


try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

# Below this many elements the launch of a Triton kernel takes longer than it saves. Products of float32 take long enough
# to launch kernels meanwhile.
ELEMENTS_WORTH_A_KERNEL = {torch.float16: 2**22, torch.bfloat16: 2**22, torch.float32: 2**20}
# A row of states must fit one program.
MOST_COLUMNS = 4096


def can_use_kernel(tensor: torch.Tensor) -> bool:
    return (
        tensor.is_cuda
        and tensor.numel() >= ELEMENTS_WORTH_A_KERNEL.get(tensor.dtype, math.inf)
        and triton is not None
        and tensor.is_contiguous()
    )


def add_and_layer_norm(
    norm: nn.Module, hidden_states: torch.Tensor, branch: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`total = hidden_states + branch`, or the states alone, and `norm(total)`; (members, ..., hidden) each."""
    has_branch = branch is not None
    like = branch if has_branch else hidden_states
    columns = like.shape[-1]
    can_fuse = (
        can_use_kernel(like)
        and hidden_states.shape == like.shape
        and hidden_states.is_contiguous()
        and norm.weight is not None
        and norm.bias is not None
        and norm.weight.dtype == like.dtype
        and columns <= MOST_COLUMNS
    )
    if not can_fuse:
        total = hidden_states + branch if has_branch else hidden_states
        return total, norm(total)
    total, normed = torch.empty_like(like) if has_branch else hidden_states, torch.empty_like(like)
    rows, block_rows = like.numel() // columns, 4
    sizes = {"BLOCK_ROWS": block_rows, "BLOCK_COLUMNS": triton.next_power_of_2(columns), "num_warps": 4}
    tensors = (hidden_states, like, total, normed, norm.weight, norm.bias)
    grid = (triton.cdiv(rows, block_rows),)
    _layer_norm_kernel[grid](*tensors, rows, columns, norm.eps, HAS_BRANCH=has_branch, **sizes)
    return total, normed


def layer_norm(norm: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """`norm(hidden_states)`"""
    return add_and_layer_norm(norm, hidden_states)[1]


def activate(activation: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    """`activation(hidden_states)`; overwrites `hidden_states` where that saves a large tensor in plain inference."""
    if not can_use_kernel(hidden_states):
        return activation(hidden_states)
    if isinstance(activation, GELUActivation) and activation.act is nn.functional.gelu:
        return torch.ops.aten.gelu_(hidden_states)
    if isinstance(activation, QuickGELUActivation):
        elements = hidden_states.numel()
        _quick_gelu_kernel[(triton.cdiv(elements, 2048),)](hidden_states, elements, BLOCK=2048, num_warps=8)
        return hidden_states
    return activation(hidden_states)


if triton is not None:

    @triton.jit
    def _layer_norm_kernel(
        states,
        branch,
        total,
        normed,
        weight,
        bias,
        rows,
        columns,
        epsilon,
        HAS_BRANCH: tl.constexpr,
        BLOCK_ROWS: tl.constexpr,
        BLOCK_COLUMNS: tl.constexpr,
    ):
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
        column = tl.arange(0, BLOCK_COLUMNS)[None, :]
        inside = (row < rows) & (column < columns)
        where = row * columns + column
        x = tl.load(states + where, mask=inside, other=0.0).to(tl.float32)
        if HAS_BRANCH:
            x += tl.load(branch + where, mask=inside, other=0.0).to(tl.float32)
            rounded = x.to(total.dtype.element_ty)
            tl.store(total + where, rounded, mask=inside)
            x = rounded.to(tl.float32)
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
