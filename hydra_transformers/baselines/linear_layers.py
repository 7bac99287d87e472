"""Linear layers of a model: found, made anew, and put in each other's place."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel


def replace(model: nn.Module, make: Callable[[nn.Module], nn.Module], modules: Iterable[nn.Module]) -> None:
    """Puts what `make` gives in the place, or places, of each of these modules."""
    made = {module: make(module) for module in modules}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """A linear layer with this weight and bias."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


@torch.no_grad()
def changed(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> nn.Linear:
    """A linear layer whose weight and bias are what `change` makes of these."""
    return linear_of(change(linear.weight), None if linear.bias is None else change(linear.bias))


def head_name(model: PreTrainedModel) -> str:
    """The name of a classifier's last linear layer, with an output for each class, whose outputs are the logits."""
    classes = model.config.num_labels
    found = [
        name for name, module in model.named_modules() if type(module) is nn.Linear and module.out_features == classes
    ]
    if not found:
        raise TypeError(
            f"{type(model).__name__} has no nn.Linear with {classes} outputs, one for each class: pass a classifier of "
            "Transformers (a Hydra's classifier is of another kind; pass its backbone)"
        )
    return found[-1]


def mean_of_heads(head: nn.Linear, members: int) -> nn.Linear:
    """Of a layer that holds the heads of all members one below the other, one head with their mean."""
    return changed(head, lambda tensor: tensor.unflatten(0, (members, -1)).mean(dim=0))
