"""Regression models that predict a variance beside each number."""

import copy

import torch
from transformers import PreTrainedModel

from ..models.auto import AutoHydra


@torch.no_grad()
def with_variance(model: PreTrainedModel) -> PreTrainedModel:
    """A regression model as a one-member Hydra whose head also predicts a variance for each output.

    It begins with a variance of 1 and the numbers of `model`, which is left as it is. It learns both by the Gaussian negative
    log-likelihood, with any Trainer; `from_pruned_members` fuses such members as it does others. Train it on labels whose
    scatter is not far from 1: divide them by their standard deviation if it is.

    Args:
        model (`PreTrainedModel`):
            A supported model of Transformers, or a one-member Hydra, made for regression.
    """
    hydra = model if hasattr(model, "num_members") else AutoHydra.from_backbone(model)
    if hydra.num_members > 1 or getattr(hydra.config, "problem_type", None) != "regression":
        raise ValueError(
            f"model is a {type(model).__name__} of {hydra.num_members} members, problem_type {hydra.config.problem_type!r}: pass one "
            "member made for regression"
        )
    config = copy.deepcopy(hydra.config)
    config.predicts_variance, config.decision = True, None
    before = hydra.state_dict()
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):  # the weights that are drawn here are not used
        result = type(hydra)(config)
    result = result.to(hydra.device, hydra.dtype)
    for name, tensor in result.state_dict().items():
        tensor.zero_()
        tensor[: len(before[name])].copy_(before[name]) if tensor.dim() else tensor.copy_(before[name])
    return result.eval()
