"""Finds, replaces and splits off linear layers of a Transformers classifier."""

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.threads import copy_sharing_weights


def replace(model: nn.Module, make: Callable[[nn.Module], nn.Module], modules: Iterable[nn.Module]) -> None:
    """Replaces each module, wherever it occurs, by `make(module)`."""
    made = {module: make(module) for module in modules}
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in made:
                setattr(parent, name, made[child])


def linear_of(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight)
    if bias is not None:
        linear.bias = nn.Parameter(bias)
    return linear


@torch.no_grad()
def changed(linear: nn.Linear, change: Callable[[Tensor], Tensor]) -> nn.Linear:
    """A linear layer with `change` applied to the weight and the bias."""
    return linear_of(change(linear.weight), None if linear.bias is None else change(linear.bias))


def mean_of_heads(head: nn.Linear, members: int) -> nn.Linear:
    """The mean of the members' heads, whose rows are stacked in `head`."""
    return changed(head, lambda tensor: tensor.unflatten(0, (members, -1)).mean(dim=0))


def head_name(model: PreTrainedModel) -> str:
    """The name of a classifier's last linear layer, which computes the logits."""
    classes = model.config.num_labels
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    found = [name for name in linears if model.get_submodule(name).out_features == classes]
    if not found:
        raise TypeError(
            f"{type(model).__name__} has no nn.Linear with {classes} outputs, one for each class: pass a classifier of "
            "Transformers (for a Hydra, its backbone)"
        )
    return found[-1]


class SplitModel:
    """A mixin for baselines: `model` computes the features that its last layer, `head`, turns into logits.

    They are saved as one classifier.
    """

    head: nn.Linear | None

    def split(self, model: PreTrainedModel) -> None:
        """Copies the classifier and takes its head off."""
        self._head_name = head_name(model)
        if model.config.num_labels == 1:
            raise ValueError("model has 1 output: pass a classifier with several classes")
        self.model = copy.deepcopy(model)
        self.head = self.model.get_submodule(self._head_name)
        self.model.set_submodule(self._head_name, nn.Identity())

    def plain_model(self) -> PreTrainedModel:
        if self.head is None:
            return self.model
        whole = copy_sharing_weights(self.model)
        whole.set_submodule(self._head_name, self.head)
        return whole

    def own_weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().own_weights().items() if not name.startswith("head.")}

    def check_is_head(self, inputs: dict[str, Tensor]) -> None:
        """Refuses a classifier that does more with its features than apply the head."""
        whole = self.plain_model().eval()
        expected = whole(**inputs).logits
        try:
            found = self.head(self.model(**inputs).logits)
        except RuntimeError:  # another layer follows, and the features do not fit into it
            found = None
        if found is None or not torch.allclose(expected, found, rtol=1e-3, atol=1e-5):
            raise ValueError(
                f"the logits of {type(whole).__name__} are not the outputs of its {self._head_name}: pass a classifier that "
                "ends in one linear layer"
            )
