"""Temperature scaling (Guo et al., 2017) in one call."""

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.zero_shot import ZeroShotClassifier
from ..uncertainty.features import collect_answers
from ..uncertainty.temperature import TemperatureScaledClassifier, TemperatureScaling, best_temperature


def temperature_scaled(model: nn.Module, data: Any, batch_size: int = 32) -> TemperatureScaledClassifier:
    """Return the model with the temperature that fits the validation data best, in `.scaling`.

    The model itself stays as it is.

    Args:
        model (`nn.Module`): a Hugging Face classifier, a Hydra or another baseline.
        data (`DataLoader`, `Dataset` or `list`): labelled, as `evaluate_uncertainty` takes it.
        batch_size (`int`, defaults to 32): rows per batch, for a Dataset of rows.
    """
    member_logits, labels = _collected(model, data, batch_size)
    return TemperatureScaling.fit(member_logits, labels).wrap(model)


def _collected(model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor]:
    """Return member logits (rows, members, classes) and labels (rows,); raise without labels."""
    member_logits, _, labels = collect_answers(model, data, batch_size, with_features=False)
    if labels is None:
        raise ValueError("data has no labels: add a column labels (or label) with class indices")
    return member_logits, labels


def temperature_scaled_clip(
    model: PreTrainedModel, class_prompts: Mapping[str, Tensor], data: Any, batch_size: int = 32
) -> PreTrainedModel:
    """Return a copy of a CLIP with the temperature that fits one label set best.

    It is for use with any other label set. The temperature T becomes part of the weights:
    `logit_scale` loses log T, and SigLIP's `logit_bias` is divided by T (which is fitted to a
    softmax over the classes, see `ZeroShotClassifier`). So the copy is saved and published as a
    plain CLIP.

    Args:
        model (`PreTrainedModel`): a model of two towers such as `CLIPModel`; a Hydra gets one
            temperature for all members.
        class_prompts (`dict`): the tokenizer's output, one row per class of the data.
        data (`DataLoader`, `Dataset` or `list`): labelled images, as `evaluate_uncertainty` takes
            it.
        batch_size (`int`, defaults to 32): rows per batch, for a Dataset of rows.
    """
    # Part of the weights, it divides the logits of each member: that is the temperature to look
    # for.
    classifier = ZeroShotClassifier(model, class_prompts)
    member_logits, labels = _collected(classifier, data, batch_size)
    temperature = best_temperature(member_logits, labels, pooled=False)

    scaled = copy.deepcopy(model)
    with torch.no_grad():
        scaled.logit_scale -= math.log(temperature)
        if hasattr(scaled, "logit_bias"):
            scaled.logit_bias /= temperature
        kept = (model.logit_scale.double() - scaled.logit_scale.double()).exp()

    # In half precision, the weight may have no number for it.
    relative_error = (kept / temperature - 1).abs()
    if (relative_error > 1e-3).any():
        warnings.warn(
            f"logit_scale is {model.logit_scale.dtype}, which rounds the temperature {temperature:.4g} to "
            f"{kept.mean().item():.4g}: pass the model in float32",
            stacklevel=2,
        )
    return scaled
