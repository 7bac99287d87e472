"""Temperature scaling (Guo et al., 2017) in one call."""

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.prediction import ZeroShotClassifier, collect_member_logits
from ..uncertainty.temperature import TemperatureScaledClassifier, TemperatureScaling


def temperature_scaled(
    model: nn.Module, data: Any, batch_size: int = 32, per_member: bool = False
) -> TemperatureScaledClassifier:
    """The model with the temperature that suits the validation data best; the model itself stays as it is.

    model: a Hugging Face classifier, a Hydra or another baseline
    data: labelled, as `evaluate_uncertainty` takes it: a DataLoader, a list of dict batches or a Dataset of rows
    batch_size: rows per batch, where the data is a Dataset of rows
    per_member: one temperature per member in place of one for all, see `TemperatureScaling.fit`

    The temperature is `temperature_scaled(...).scaling`.
    """
    member_logits, labels = collect_member_logits(model, data, batch_size)
    if labels is None:
        raise ValueError("data has no labels: add a column labels (or label) with class indices")
    return TemperatureScaling.fit(member_logits, labels, per_member).wrap(model)


def temperature_scaled_clip(
    model: PreTrainedModel, class_prompts: Mapping[str, Tensor], data: Any, batch_size: int = 32
) -> PreTrainedModel:
    """A copy of a CLIP with the temperature that suits one label set best, to be used with any other.

    model: a `CLIPModel` or another model of two towers, or a Hydra of one, for all members of which it finds one temperature
    class_prompts: the tokenizer's output, one row per class of the data
    data: labelled images, as `evaluate_uncertainty` takes it
    batch_size: rows per batch, where the data is a Dataset of rows

    Cosines are multiplied by exp(logit_scale), so dividing by a temperature T is the same as taking log T from `logit_scale`, and
    dividing SigLIP's `logit_bias` by T, which is fitted to its softmax over the classes, see `ZeroShotClassifier`. The copy is a
    plain CLIP, whatever its prompts are, and is saved and published as one. The answers of a single CLIP stay the same, their
    probabilities do not.
    """
    if not hasattr(model, "get_text_features"):
        raise TypeError(f"model is a {type(model).__name__}, no model of two towers: pass it to temperature_scaled")
    classifier = ZeroShotClassifier(model, class_prompts)
    scaling = temperature_scaled(classifier, data, batch_size).scaling
    scaled = copy.deepcopy(model)
    temperature = scaling.temperature[0]
    with torch.no_grad():
        scaled.logit_scale -= math.log(temperature)
        if hasattr(scaled, "logit_bias"):
            scaled.logit_bias /= temperature
        kept = (model.logit_scale.double() - scaled.logit_scale.double()).exp()
    if ((kept / temperature - 1).abs() > 1e-3).any():
        warnings.warn(
            f"logit_scale is {model.logit_scale.dtype}, which makes {kept.mean().item():.4g} of the temperature "
            f"{temperature:.4g}: pass the model in float32",
            stacklevel=2,
        )
    return scaled
