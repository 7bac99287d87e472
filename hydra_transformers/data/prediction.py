"""From a model and data to `member_logits` (batch, members, classes).

Reads every kind of model in one way: a Hydra, a plain Hugging Face classifier, two towers with
    class prompts, saved arrays.
"""

import inspect
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ..model_info import padding_token_of, task_of_logits
from ..models.ensembling import log_mean_probability
from ..models.inputs import evaluation_mode
from ..models.modeling_hydra import HydraClassifierOutput
from ..models.task import classifies_tokens, config_inside
from .batches import split_labels


def predict(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the member logits (batch, members, classes) of one batch; a plain model has one
    member.

    Labels, and entries that the model's `forward` does not name, are not passed to the model.
    """
    inputs, _ = split_labels(batch)
    accepted = accepted_inputs(model, inputs)
    with evaluation_mode(model), torch.inference_mode():
        output = model(**accepted)
        return member_logits_of(output, type(model).__name__, classifies_tokens(model))


def member_logits_of(output: Any, source: str = "the model", per_token: bool = False) -> Tensor:
    """Read (batch, members, classes) from a model's output.

    They are its `member_logits`, or else its `logits` or `logits_per_image` as those of one member.

    per_token: of a classifier of tokens, (batch, members, tokens, classes)
    """
    names = ("member_logits", "logits", "logits_per_image")
    present = [name for name in names if getattr(output, name, None) is not None]
    if not present:
        raise TypeError(
            f"the output of {source} has neither logits nor logits_per_image: pass a classification model, "
            "or wrap CLIP or SigLIP in ZeroShotClassifier"
        )
    name = present[0]
    found = getattr(output, name)
    logits = found
    if name != "member_logits":
        logits = found.unsqueeze(1)
    if logits.dim() != 3 + per_token:
        places = "tokens, " if per_token else ""
        raise ValueError(
            f"{source} gave {name} of shape {tuple(found.shape)}: expected (batch, members, {places}classes), or "
            "without members"
        )
    return logits


def answer_of(model: nn.Module, member_logits: Tensor) -> HydraClassifierOutput:
    """Return the output of an ensemble of models like `model`, from its members'
    `member_logits_of`."""
    task = task_of_logits(model, member_logits.shape[-1])
    logits = task.ensemble_logits(member_logits, config_inside(model))
    return HydraClassifierOutput(logits=logits, member_logits=member_logits)


def joined_labels(labels: Sequence[Tensor | None]) -> Tensor | None:
    """Return the labels of all batches (samples,) on the CPU; None if no batch has any."""
    known = [batch.cpu() for batch in labels if batch is not None]
    if known and len(known) != len(labels):
        raise ValueError(f"{len(known)} of {len(labels)} batches have labels: give them to every batch, or to none")
    if not known:
        return None
    return torch.cat(known)


# Its inputs


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's inputs."""
    if isinstance(getattr(model, "device", None), torch.device):
        return model.device
    for tensor in chain(model.parameters(), model.buffers()):
        return tensor.device
    return torch.device("cpu")


def accepted_inputs(model: nn.Module, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the entries that the model's `forward` names, or that it `reads`; all of them for a
    wrapper with `**inputs` only.

    Masked tokens are replaced by the padding token where the model goes by it.
    """
    inputs = _with_padding_token(inputs, padding_token_of(model))

    # What the model names in its signature; wrappers with **inputs alone take all.
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


def _with_padding_token(inputs: dict[str, Tensor], padding: int | None) -> dict[str, Tensor]:
    """Return inputs whose masked tokens are the padding token, if there is one."""
    tokens = inputs.get("input_ids")
    mask = inputs.get("attention_mask")
    if padding is None or tokens is None or mask is None or tokens.shape != mask.shape:
        return inputs
    return inputs | {"input_ids": tokens.masked_fill(mask == 0, padding)}


class SavedLogits(nn.Module):
    """A stand-in for a model, with saved member logits.

    Its batches are `{"member_logits": ..., "labels": ...}`.
    """

    def forward(self, member_logits: Tensor) -> HydraClassifierOutput:
        return HydraClassifierOutput(logits=log_mean_probability(member_logits), member_logits=member_logits)
