"""The cost of a model: parameters and multiply-adds, counted.

A model around another one has it as `input_model`; one that runs it several times also has `count_multiply_adds`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedConfig, PreTrainedModel

from .data.prediction import accepted_inputs
from .data.zero_shot import ZeroShotClassifier, first_token_kwargs
from .fusion.probe import example_inputs
from .fusion.structure import plain_config, without_weights
from .models.inputs import most_tokens


@dataclass(frozen=True)
class Cost:
    """parameters: of the whole model; multiply_adds: for one sample"""

    parameters: int
    multiply_adds: int


def compare_costs(models: Mapping[str, nn.Module]) -> dict[str, Cost]:
    """The cost of each model, which is not run.

    Args:
        models (`dict[str, nn.Module]`): name -> a Transformers model, a Hydra or a baseline made of these.
    """
    return {name: Cost(count_parameters(model), count_multiply_adds(model)) for name, model in models.items()}


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def count_multiply_adds(model: nn.Module) -> int:
    """Multiply-adds for one sample (for two towers an image and a prompt), counted on the meta device.

    A `ZeroShotClassifier` computes its prompts once: only the image and its products with the prompts' features count.
    """
    if hasattr(model, "count_multiply_adds"):
        return model.count_multiply_adds()
    if isinstance(model, ZeroShotClassifier):
        clip = without_weights(type(model.model), model.model.config)
        images = example_inputs(clip.config.vision_config, 1, "meta") | first_token_kwargs(clip)
        return multiply_adds_of(clip.get_image_features, **images) + model.text_features.numel()
    if hasattr(model, "input_model"):
        return count_multiply_adds(model.input_model)
    return multiply_adds_of(without_weights(type(model), model.config), **inputs_for(model, 1, "meta"))


def multiply_adds_of(forward: Callable, **inputs: Any) -> int:
    """Multiply-adds of one call."""
    # Some models (DeBERTa) look for padding among the tokens, to warn of it: the meta device has none to look at.
    unseen = patch.object(PreTrainedModel, "warn_if_padding_and_no_attention_mask", lambda *_: None, create=True)
    # With gradients on, models take their plain path: kernels of their own would not be counted.
    with unseen, FlopCounterMode(display=False) as counter, torch.enable_grad():
        forward(**inputs)
    return counter.get_total_flops() // 2


def inputs_for(model: nn.Module, batch_size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Those of `example_inputs` that a model reads: a classifier on one of two towers has the config of both, and RoBERTa has
    fewer positions than its config says."""
    reader, config = _reader_in(model), config_in(model)
    inputs = accepted_inputs(reader, example_inputs(config, batch_size, device))
    if "input_ids" in inputs and getattr(config, "max_position_embeddings", 0) > 0:
        inputs["input_ids"] = inputs["input_ids"][:, : most_tokens(reader)]
    return inputs


def _reader_in(model: nn.Module) -> nn.Module:
    """The model that reads the inputs: this one, or the one inside it."""
    return _reader_in(model.input_model) if hasattr(model, "input_model") else model


def config_in(model: nn.Module) -> PreTrainedConfig:
    """A model's config, or that of the model inside it."""
    model = _reader_in(model)
    return model.config if hasattr(model, "config") else config_in(model.model)


def unpruned_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """The unpruned Transformers model that a Hydra is built from, on the meta device."""
    cls = type(model)
    if not hasattr(cls, "backbone_classes"):
        raise TypeError(f"model is a {cls.__name__}: pass a Hydra")
    return without_weights(cls.backbone_classes[0], plain_config(cls, model.config))


def readable_count(count: int) -> str:
    """12,345 or 1.23 M or 4.56 G."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"
