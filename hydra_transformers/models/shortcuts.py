"""When a shortcut gives the same result as the plain way."""

import torch
from torch import nn


def is_exporting() -> bool:
    """Whether a graph is recorded that will serve batches of every size, with gradients and without."""
    return torch.compiler.is_exporting() or torch.jit.is_tracing()


def is_inference(tensor: torch.Tensor) -> bool:
    """Whether products may be joined: nothing differentiates, casts or counts them, nor exports a graph for all sizes."""
    return not (
        torch.is_grad_enabled() or is_exporting() or tensor.is_meta or torch.is_autocast_enabled(tensor.device.type)
    )


def is_plain_inference(tensor: torch.Tensor) -> bool:
    """Whether results may also be written where they belong: nobody traces, transforms or only pretends to compute."""
    return is_inference(tensor) and not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0  # fake tensors, counters of operations
        or torch._C._functorch.maybe_current_level() is not None  # vmap and its kin
        or torch.autograd.forward_ad._current_level >= 0
    )


def is_bare(module: nn.Module, kind: type) -> bool:
    """Whether a module is of this very type and nothing happens around its forward: no adapter, hook, offloading, nor
    a replica of `nn.DataParallel`, which holds its parameters elsewhere."""
    state = module.__dict__
    return (
        module.__class__ is kind
        and not state["_forward_hooks"]
        and not state["_forward_pre_hooks"]
        and "forward" not in state
        and "_compiled_call_impl" not in state
        and "_is_replica" not in state
    )
