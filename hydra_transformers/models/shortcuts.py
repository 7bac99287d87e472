"""When a shortcut gives the same result as the plain way."""

import torch
from torch import nn


def is_plain_inference(tensor: torch.Tensor) -> bool:
    """Whether results may be written where they belong: nothing differentiates, traces or casts on the way."""
    return not (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or tensor.is_meta
        or torch.is_autocast_enabled(tensor.device.type)
    )


def is_bare(module: nn.Module, kind: type) -> bool:
    """Whether a module is of this very type and nothing happens around its forward: no adapter, hook, offloading, nor
    a replica of `nn.DataParallel`, which holds its parameters elsewhere."""
    return (
        module.__class__ is kind
        and not module._forward_hooks
        and not module._forward_pre_hooks
        and "forward" not in module.__dict__
        and "_is_replica" not in module.__dict__
    )
