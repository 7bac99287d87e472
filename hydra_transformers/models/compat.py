"""What torch is doing, and what is used of its private interfaces: where one is gone, the answer is the careful one."""

from collections.abc import Callable

import torch


def is_exporting() -> bool:
    """Whether a graph is recorded that will serve batches of every size, with gradients and without."""
    # torch 2.11 says of every compilation that it is an export; what it sets for exports alone tells.
    is_export = getattr(torch.compiler, "_is_exporting_flag", None)
    return (torch.compiler.is_exporting() if is_export is None else is_export) or torch.jit.is_tracing()


def is_recording_kernels() -> bool:
    """Whether what runs on the GPU is recorded as a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def has_global_hooks() -> bool:
    """Whether anyone watches the calls of all modules, by a hook for every module."""
    try:
        return torch.nn.modules.module._has_any_global_hook()
    except AttributeError:
        return True


def is_watched() -> bool:
    """Whether operations do more than compute: fake tensors, counters, vmap and its kin, forward-mode derivatives, or modes
    that functions of torch go through (but not the one that says on which device tensors are made)."""
    try:
        modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
        return (
            any(not isinstance(mode, torch.utils._device.DeviceContext) for mode in modes)
            or torch._C._len_torch_dispatch_stack() > 0
            or torch._C._functorch.maybe_current_level() is not None
            or torch.autograd.forward_ad._current_level >= 0
        )
    except AttributeError:
        return True


def quickly_launched_attention() -> Callable | None:
    """The attention kernel that takes least time to launch, which is not the one that torch would choose: (query, key, value,
    is_causal, scaling) -> output, (rows, tokens, heads, head_dim) each.

    None where the user has switched it off (`torch.nn.attention.sdpa_kernel`), or where it is not NVIDIA's.
    """
    if torch.version.hip is not None or not torch.backends.cuda.mem_efficient_sdp_enabled():
        return None
    return None if EFFICIENT_ATTENTION is None else efficient_attention


EFFICIENT_ATTENTION = getattr(getattr(torch.ops.aten, "_efficient_attention_forward", None), "default", None)


def efficient_attention(query, key, value, is_causal: bool, scaling: float) -> torch.Tensor:
    # No bias, one length for all, no dropout; a causal mask is number 1; no log-sum-exp.
    given = (None, None, None, None, None, 0.0, int(is_causal), False)
    return EFFICIENT_ATTENTION(query, key, value, *given, scale=scaling)[0]
