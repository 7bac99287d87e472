"""The cost of a model: parameters and multiply-adds, counted.

A model around another one has it as `input_model`; one that runs it several times also has
`count_multiply_adds`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from .data.prediction import accepted_inputs
from .data.zero_shot import ZeroShotClassifier, first_token_kwargs
from .fusion.probe import example_inputs
from .fusion.structure import plain_config, without_weights
from .models.inputs import most_tokens
from .models.task import config_inside


@dataclass(frozen=True)
class Cost:
    """What a model costs.

    Attributes:
        parameters (`int`): of the whole model.
        multiply_adds (`int`): for one sample.
    """

    parameters: int
    multiply_adds: int


def compare_costs(models: Mapping[str, nn.Module]) -> dict[str, Cost]:
    """Return the cost of each model; none is run.

    Args:
        models (`dict[str, nn.Module]`): name -> a Transformers model, a Hydra or a baseline made of
            these.
    """
    costs = {}
    for name, model in models.items():
        costs[name] = Cost(count_parameters(model), count_multiply_adds(model))
    return costs


def count_parameters(model: nn.Module) -> int:
    """Count the numbers in a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def count_multiply_adds(model: nn.Module) -> int:
    """Count multiply-adds for one sample, for two towers an image and a prompt, on the meta device.

    A `ZeroShotClassifier` computes its prompts once: only the image and its products with the
    prompts' features count.
    """
    own_count = getattr(model, "count_multiply_adds", None)
    if own_count is not None:
        return own_count()
    if isinstance(model, ZeroShotClassifier):
        inner: Any = model.model
        clip: Any = without_weights(type(inner), inner.config)
        images = example_inputs(clip.config.vision_config, 1, "meta") | first_token_kwargs(clip)
        products = model.text_features.numel()
        return multiply_adds_of(clip.get_image_features, **images) + products
    input_model = getattr(model, "input_model", None)
    if input_model is not None:
        return count_multiply_adds(input_model)
    transformer: Any = model
    weightless = without_weights(type(transformer), transformer.config)
    return multiply_adds_of(weightless, **inputs_for(model, 1, "meta"))


def multiply_adds_of(forward: Callable, **inputs: Any) -> int:
    """Count multiply-adds of one call.

    Args:
        forward (`Callable`): a model, or a method of one.
        inputs: what it is called with.
    """
    # With gradients on, models take their plain path: kernels of their own would not be counted.
    with _without_look_for_padding(forward), FlopCounterMode(display=False) as counter, torch.enable_grad():
        forward(**inputs)
    return counter.get_total_flops() // 2


@contextmanager
def _without_look_for_padding(forward: Callable) -> Iterator[None]:
    """Keep a model (DeBERTa) from looking for padding among its tokens, only to warn of it.

    On the meta device there are no tokens to look at.
    """
    owner = getattr(forward, "__self__", forward)
    models = []
    if isinstance(owner, nn.Module):
        models = [module for module in owner.modules() if isinstance(module, PreTrainedModel)]
    for model in models:
        vars(model)["warn_if_padding_and_no_attention_mask"] = lambda *_: None
    try:
        yield
    finally:
        for model in models:
            del vars(model)["warn_if_padding_and_no_attention_mask"]


def inputs_for(model: nn.Module, batch_size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Return those of `example_inputs` that a model reads.

    A classifier on one of two towers has the config of both, and RoBERTa has fewer positions than
    its config says.
    """
    reader = _reader_in(model)
    config = config_inside(reader)
    inputs = accepted_inputs(reader, example_inputs(config, batch_size, device))
    if "input_ids" in inputs and getattr(config, "max_position_embeddings", 0) > 0:
        length = most_tokens(reader)
        inputs["input_ids"] = inputs["input_ids"][:, :length]
    return inputs


def _reader_in(model: nn.Module) -> nn.Module:
    """Return the model that reads the inputs: this one, or the one inside it."""
    inner = getattr(model, "input_model", None)
    while inner is not None:
        model = inner
        inner = getattr(model, "input_model", None)
    return model


def unpruned_backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the unpruned Transformers model that a Hydra is built from, on the meta device."""
    cls: Any = type(model)
    if not hasattr(cls, "backbone_classes"):
        raise TypeError(f"model is a {cls.__name__}: pass a Hydra")
    return without_weights(cls.backbone_classes[0], plain_config(cls, model.config))


def readable_count(count: int) -> str:
    """Write a number as 12,345 or 1.23 M or 4.56 G."""
    for unit, size in (("G", 10**9), ("M", 10**6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:,}"
