"""Model soups (Wortsman et al., 2022): one model with the mean weights of several fine-tuned
models."""

import copy
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..models.auto import check_has_no_adapters, hydra_classes
from . import check_can_be_fused
from .building import mean_of
from .checks import LEAST_COSINE_OF_RELATED, cosine_of


class UnrelatedMembersError(ValueError):
    """The models were not fine-tuned from one pre-trained model."""


@torch.no_grad()
def soup(models: Sequence[PreTrainedModel]) -> PreTrainedModel:
    """Averages the weights of several models.

    Args:
        models (`Sequence[PreTrainedModel]`): models fine-tuned from one pre-trained model for the
            same classes, of any family; or one-member Hydras that keep the same heads. Others
            raise: the mean of networks trained apart is useless.

    Returns:
        `PreTrainedModel`: a new model of their class, in evaluation mode.
    """
    models = list(models)
    _check_can_be_averaged(models)
    result = copy.deepcopy(models[0])
    if getattr(result, "decision", None) is not None:
        result.decision = result.config.decision = None  # fitted for the weights of one model
    states = [model.state_dict() for model in models]
    for name, tensor in result.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(mean_of([state[name] for state in states], tensor.device))
    return result.eval()


def _check_can_be_averaged(models: Sequence[PreTrainedModel]) -> None:
    first = models[0]
    for place, model in enumerate(models):
        check_has_no_adapters(model, f"models[{place}]")
        if not isinstance(model, PreTrainedModel) or type(model) is not type(first):
            raise TypeError(
                f"models[{place}] is a {type(model).__name__}, models[0] a {type(first).__name__}: pass models "
                "fine-tuned from one pre-trained model of Transformers"
            )
        if getattr(model.config, "kept_heads", None) != getattr(first.config, "kept_heads", None):
            raise ValueError("models keep different heads, so their attention has no mean: pass members with the same")
        if model.config.id2label != first.config.id2label:
            raise ValueError(f"models[{place}] has other classes than models[0]: pass models of the same labels")
    if isinstance(first, (*hydra_classes(), *hydra_classes().values())):
        check_can_be_fused(models, "models")
    template = {name: tensor.shape for name, tensor in first.state_dict().items()}
    encoder = dict(first.base_model.named_parameters())
    matrices = [name for name, parameter in encoder.items() if parameter.dim() > 1]
    for place, model in enumerate(models[1:], start=1):
        shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
        differing = sorted(name for name in template.keys() | shapes.keys() if template.get(name) != shapes.get(name))
        if differing:
            raise ValueError(f"models[{place}] has another {differing[0]} than models[0]: pass models of one kind")
        other = dict(model.base_model.named_parameters())
        cosine = cosine_of((encoder[name], other[name]) for name in matrices)
        if cosine is not None and cosine < LEAST_COSINE_OF_RELATED:
            raise UnrelatedMembersError(
                f"models[{place}] has little in common with models[0] (cosine similarity {cosine:.2f} of their "
                "encoders), so their mean works like neither: pass models fine-tuned from one pre-trained model"
            )
