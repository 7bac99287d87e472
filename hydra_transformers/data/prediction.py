"""From a model and data to `member_logits` (batch, members, classes).

Reads every kind of model in one way: a Hydra, a plain Hugging Face classifier, two towers with class prompts, saved arrays.
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..models.ensembling import log_mean_probability
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput
from ..models.task import load_task
from .batches import split_labels
from .labels import model_classes
from .zero_shot import ZeroShotClassifier, zero_shot_in


# Problem types of configs that do not choose one of several classes.
OTHER_PROBLEMS = {"multi_label_classification": "multi-label classification", "regression": "regression"}


def predict(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """The member logits (batch, members, classes) of one batch; a plain model has one member.

    Labels, and entries that the model's `forward` does not name, are not passed to the model.
    """
    inputs = accepted_inputs(model, split_labels(batch)[0])
    with evaluation_mode(model), torch.inference_mode():
        return member_logits_of(model(**inputs), type(model).__name__, classifies_tokens(model))


def member_logits_of(output: Any, source: str = "the model", per_token: bool = False) -> Tensor:
    """Read (batch, members, classes) from a model's output: `member_logits`, else `logits` or `logits_per_image` as one member.

    per_token: of a classifier of tokens, (batch, members, tokens, classes)
    """
    places = "tokens, " if per_token else ""
    names = ("member_logits", "logits", "logits_per_image")
    name = next((name for name in names if getattr(output, name, None) is not None), None)
    if name is None:
        raise TypeError(
            f"the output of {source} has neither logits nor logits_per_image: pass a classification model, "
            "or wrap CLIP or SigLIP in ZeroShotClassifier"
        )
    logits = output.member_logits if name == "member_logits" else getattr(output, name).unsqueeze(1)
    if logits.dim() != 3 + per_token:
        raise ValueError(
            f"{source} gave {name} of shape {tuple(getattr(output, name).shape)}: expected (batch, members, {places}classes), or "
            "without members"
        )
    return logits


def answer_of(model: nn.Module, member_logits: Tensor) -> HydraClassifierOutput:
    """The output of an ensemble of models like `model`, from its members' `member_logits_of`."""
    problem_type = problem_type_of_answers(model)
    if problem_type is None and getattr(config_of(model), "num_labels", None) == 1:
        problem_type = "regression"  # as in Transformers' loss
    elif problem_type is None and member_logits.shape[-1] == 1:
        problem_type = "multi_label_classification"  # a probability, as the pipelines read it
    logits = load_task(problem_type).ensemble_logits(member_logits, config_of(model))
    return HydraClassifierOutput(logits=logits, member_logits=member_logits)


def joined_labels(labels: Sequence[Tensor | None]) -> Tensor | None:
    """The labels of all batches (samples,) on the CPU; None if no batch has any."""
    known = [batch.cpu() for batch in labels if batch is not None]
    if known and len(known) != len(labels):
        raise ValueError(f"{len(known)} of {len(labels)} batches have labels: give them to every batch, or to none")
    return torch.cat(known) if known else None


# The model


def config_of(model: nn.Module | None) -> Any:
    """The config of a model, or of the model inside it; None where there is none."""
    return next((module.config for module in models_inside(model) if hasattr(module, "config")), None)


def models_inside(model: nn.Module | None) -> Iterator[nn.Module]:
    """The model and those it wraps, from the outside in; of several the first."""
    while model is not None:
        yield model
        inside = (getattr(model, name, None) for name in ("model", "module"))
        model = model.models[0] if hasattr(model, "models") else next(filter(None, inside), None)


def classifies_tokens(model: nn.Module | None) -> bool:
    """Whether a model, or the one inside it, gives every token a class; its logits are (batch, tokens, classes)."""
    return any("ForTokenClassification" in type(module).__name__ for module in models_inside(model))


def classes_of(model: nn.Module | None) -> list[str] | None:
    """The names of a model's classes, in order; None where it has none."""
    zero_shot = None if model is None else zero_shot_in(model)
    if zero_shot is not None:
        return zero_shot.class_names
    config = config_of(model)
    return None if getattr(config, "id2label", None) is None else model_classes(config)


def device_of(model: nn.Module) -> torch.device:
    """The device of the model's inputs."""
    if isinstance(getattr(model, "device", None), torch.device):
        return model.device
    return next((tensor.device for tensor in chain(model.parameters(), model.buffers())), torch.device("cpu"))


def problem_type_of_answers(model: nn.Module) -> str | None:
    """The problem type of the model's own logits. SigLIP says yes or no to each text, unless in a `ZeroShotClassifier`."""
    inside = list(models_inside(model))
    has_bias = any(hasattr(module, "logit_bias") for module in inside)
    chooses_one = any(isinstance(module, ZeroShotClassifier) for module in inside)
    if has_bias and not chooses_one:
        return "multi_label_classification"
    return getattr(config_of(model), "problem_type", None)


def check_chooses_one_class(model: nn.Module, name: str) -> None:
    """Raises for multi-label and regression models, whose logits have no softmax, and for classifiers of tokens."""
    problem = OTHER_PROBLEMS.get(getattr(config_of(model), "problem_type", None))
    problem = "token classification" if classifies_tokens(model) else problem
    if problem is not None:
        raise ValueError(f"{name} is made for {problem}: pass a model that chooses one of several classes")


# Its inputs


def accepted_inputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """The entries that the model's `forward` names, or that it `reads`; all of them for a wrapper with `**inputs` only.

    Masked tokens are replaced by the padding token where the model goes by it.
    """
    tokens, mask, padding = inputs.get("input_ids"), inputs.get("attention_mask"), padding_of(model)
    if padding is not None and tokens is not None and mask is not None and tokens.shape == mask.shape:
        inputs = inputs | {"input_ids": tokens.masked_fill(mask == 0, padding)}
    parameters = inspect.signature(model.forward).parameters.values()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = {parameter.name for parameter in parameters if parameter.kind not in variadic}
    if not named:
        return inputs
    named |= getattr(model, "reads", frozenset())  # a baseline passes on what the model inside reads
    accepted = {name: value for name, value in inputs.items() if name in named}
    if not accepted:
        raise ValueError(
            f"{type(model).__name__} takes none of the batch's entries ({', '.join(inputs) or 'none'}): "
            f"it reads {', '.join(sorted(named))}, which its tokenizer or image processor makes"
        )
    return accepted


def padding_of(model: nn.Module) -> int | None:
    """The padding token that a plain causal classifier finds the last token of a text by; None for others."""
    # Transformers calls its head `score` there, and `classifier` elsewhere. Hydras read the mask as well.
    is_decoder = any(isinstance(getattr(module, "score", None), nn.Module) for module in model.modules())
    return getattr(config_of(model), "pad_token_id", None) if is_decoder else None


class SavedLogits(nn.Module):
    """A stand-in for a model with saved member logits: its batches are `{"member_logits": ..., "labels": ...}`."""

    def forward(self, member_logits: Tensor) -> HydraClassifierOutput:
        return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)
