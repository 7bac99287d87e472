"""Finds and replaces linear layers of a Transformers classifier."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def replace(model: nn.Module, make: Callable[[nn.Module], nn.Module], modules: Iterable[nn.Module]) -> None:
    """Replace each module, wherever it occurs, by `make(module)`."""
    replacements = {module: make(module) for module in modules}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replacements:
                setattr(parent, name, replacements[child])


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear layer with these numbers."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


@torch.no_grad()
def changed(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> nn.Linear:
    """Return a linear layer with `change` applied to the weight and the bias."""
    bias = None
    if linear.bias is not None:
        bias = change(linear.bias)
    return linear_of(change(linear.weight), bias)


def head_name(model: PreTrainedModel) -> str:
    """Return the name of a classifier's last linear layer, which computes the logits."""
    classes = model.config.num_labels
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    heads = [name for name in linears if model.get_submodule(name).out_features == classes]
    if not heads:
        raise TypeError(
            f"{type(model).__name__} has no nn.Linear with {classes} outputs, one for each class: pass a classifier "
            "of Transformers (for a Hydra, its backbone)"
        )
    return heads[-1]
