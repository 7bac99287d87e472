"""A classifier of Transformers, taken apart into what computes features and the linear layer that makes logits of them."""

import copy

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.threads import copy_sharing_weights
from .linear_layers import head_name


def without_head(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.Linear, str]:
    """A copy of a classifier that answers with the features which its last linear layer reads, in place of logits; that layer;
    and its name."""
    name = head_name(model)
    if model.config.num_labels == 1:
        raise ValueError(
            "model has 1 output, and this is about choosing one of several classes: pass such a classifier"
        )
    headless = copy.deepcopy(model)
    head = headless.get_submodule(name)
    headless.set_submodule(name, nn.Identity())
    return headless, head, name


def with_head(headless: PreTrainedModel, head: nn.Linear, name: str) -> PreTrainedModel:
    """The classifier again, with the same weights."""
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
