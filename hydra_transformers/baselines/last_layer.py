"""Classifiers of Transformers, split into a model that computes features and the linear layer that makes logits of them."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.threads import copy_sharing_weights
from .linear_layers import head_name


class SplitModel:
    """A part of baselines that keep a classifier's last linear layer apart: `model` answers with the features that `head` reads.

    It is saved as the whole classifier.
    """

    head: nn.Linear | None

    def split(self, model: PreTrainedModel) -> None:
        """Takes a copy of the classifier, in two parts."""
        self._head_name = head_name(model)
        if model.config.num_labels == 1:
            raise ValueError(
                "model has 1 output, and this is about choosing one of several classes: pass such a classifier"
            )
        self.model = copy.deepcopy(model)
        self.head = self.model.get_submodule(self._head_name)
        self.model.set_submodule(self._head_name, nn.Identity())

    def plain_model(self) -> PreTrainedModel:
        return self.model if self.head is None else with_head(self.model, self.head, self._head_name)

    def own_weights(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in super().own_weights().items() if not name.startswith("head.")}


def with_head(headless: PreTrainedModel, head: nn.Linear, name: str) -> PreTrainedModel:
    """The whole classifier again, with the same weights."""
    whole = copy_sharing_weights(headless)
    whole.set_submodule(name, head)
    return whole


def check_is_head(headless: PreTrainedModel, head: nn.Linear, name: str, inputs: dict[str, Tensor]) -> None:
    """Refuses a classifier whose logits are not what the head makes of the features."""
    whole = with_head(headless, head, name).eval()
    expected = whole(**inputs).logits
    try:
        found = head(headless(**inputs).logits)
    except RuntimeError:  # features, in place of logits, do not fit what comes behind
        found = None
    if found is None or not torch.allclose(expected, found, rtol=1e-3, atol=1e-5):
        raise ValueError(
            f"the logits of {type(whole).__name__} are not the outputs of its {name}: pass a classifier that ends in one linear "
            "layer"
        )
