"""From the members' logits to the ensemble's answer: combined logits, losses, outputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.utils import ModelOutput

from .shortcuts import is_exporting


@dataclass
class HydraClassifierOutput(ModelOutput):
    """
    loss: scalar, where labels were given
    logits: (batch, classes), the log of the members' mean probability
    member_logits: (batch, members, classes)
    hidden_states: one (batch, members, tokens, hidden) per layer and for the embeddings, where asked for
    attentions: one (batch, heads of all members, tokens, tokens) per layer, where asked for
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    member_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None


@dataclass
class HydraCLIPOutput(ModelOutput):
    """
    loss: scalar, where `return_loss` was set
    logits_per_image: (images, texts), the log of the members' mean probability over the texts
    logits_per_text: (texts, images), the log of the members' mean probability over the images
    member_logits: (images, members, texts)
    text_embeds: (texts, members of the text tower, projection), normalised
    image_embeds: (images, members of the vision tower, projection), normalised
    """

    loss: torch.FloatTensor | None = None
    logits_per_image: torch.FloatTensor | None = None
    logits_per_text: torch.FloatTensor | None = None
    member_logits: torch.FloatTensor | None = None
    text_embeds: torch.FloatTensor | None = None
    image_embeds: torch.FloatTensor | None = None
    text_model_output: BaseModelOutputWithPooling | None = None
    vision_model_output: BaseModelOutputWithPooling | None = None

    def to_tuple(self) -> tuple:
        return tuple(value.to_tuple() if isinstance(value, ModelOutput) else value for value in self.values())


def log_mean_probability(member_logits: torch.Tensor) -> torch.Tensor:
    """Log of the mean over members of softmax: (batch, members, classes) -> (batch, classes), at least float32."""
    log_probabilities = nn.functional.log_softmax(at_least_float32(member_logits), dim=-1)
    if is_exporting():
        total = torch.logsumexp(log_probabilities, dim=1)  # which every format has
    else:
        # member by member: one kernel each, a third of what logsumexp launches
        total = reduce(torch.logaddexp, log_probabilities.unbind(dim=1))
    return total - math.log(member_logits.shape[1])


def logit_of_mean_probability(member_logits: torch.Tensor) -> torch.Tensor:
    """Logit of the mean over members of sigmoid: (batch, members, classes) -> (batch, classes), at least float32."""
    member_logits = at_least_float32(member_logits)
    yes = torch.logsumexp(nn.functional.logsigmoid(member_logits), dim=1)
    no = torch.logsumexp(nn.functional.logsigmoid(-member_logits), dim=1)
    return yes - no


def ensemble_logits(member_logits: torch.Tensor, problem_type: str | None) -> torch.Tensor:
    """What every consumer of logits then reads as the ensemble's answer: (batch, members, classes) -> (batch, classes).

    Softmax over several classes, sigmoid for multi-label problems and for a single output of unknown problem type (as
    the pipelines do), and the plain mean for regression.
    """
    if problem_type == "regression":
        return at_least_float32(member_logits).mean(dim=1)
    if problem_type == "multi_label_classification" or member_logits.shape[-1] == 1:
        return logit_of_mean_probability(member_logits)
    return log_mean_probability(member_logits)


def ensemble_loss(loss_function: Callable, labels: torch.Tensor, member_logits: torch.Tensor, config, **kwargs):
    """The mean of the members' losses, or with `config.ensemble_loss == "ensemble"` the loss of the ensemble's answer.

    loss_function: `loss_function(labels, logits, config, **kwargs)`, as Transformers' models have it
    """
    members = member_logits.unbind(dim=1)
    if config.ensemble_loss == "members":
        return torch.stack([loss_function(labels, logits, config, **kwargs) for logits in members]).mean()
    if config.problem_type is None:
        # Transformers settles the problem type from the labels when it first computes a loss.
        loss_function(labels, members[0], config)
    return loss_function(labels, ensemble_logits(member_logits, config.problem_type), config, **kwargs)


def classifier_output(model, member_logits: torch.Tensor, labels, encoder_outputs, **kwargs) -> HydraClassifierOutput:
    """What a classifier returns for its members' logits (batch, members, classes), with the loss where labels are."""
    loss = None
    if labels is not None:
        loss = ensemble_loss(model.loss_function, labels, member_logits, model.config, **kwargs)
    return HydraClassifierOutput(
        loss=loss,
        logits=ensemble_logits(member_logits, model.config.problem_type),
        member_logits=member_logits,
        hidden_states=encoder_outputs.hidden_states,
        attentions=encoder_outputs.attentions,
    )


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def batch_first(hidden_states: torch.Tensor, num_members: int) -> torch.Tensor:
    """(members or 1, batch, ...) -> (batch, members, ...), a view."""
    return hidden_states.expand(num_members, *hidden_states.shape[1:]).transpose(0, 1)


class RecordedStates(nn.Module):
    """What Transformers records as a model's hidden states: layers read the very tensors that the caller is shown, so
    that these have gradients."""

    def forward(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """A layer's input and output, (batch, members, tokens, hidden): the first input and all outputs are recorded."""
        return after


def wants_hidden_states(config, kwargs: dict) -> bool:
    return bool(kwargs.get("output_hidden_states", getattr(config, "output_hidden_states", False)))


def wants_every_token(config, kwargs: dict) -> bool:
    """Whether the caller asked for hidden states or attentions, which the last layer then owes for all tokens."""
    return any(
        kwargs.get(name, getattr(config, name, False)) for name in ("output_hidden_states", "output_attentions")
    )
