"""From the members' states to the ensemble's answer: outputs, the classifier of every family, logits, losses."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import nn
from transformers.utils import ModelOutput, logging

from .compat import is_exporting
from .configuration_hydra import settle_problem_type


logger = logging.get_logger(f"transformers.{__name__}")


@dataclass
class HydraModelOutput(ModelOutput):
    """What an encoder returns. Whoever knows nothing of members reads the mean over them in the usual places.

    last_hidden_state: (batch, tokens, hidden), the mean over the members
    pooler_output: (batch, pooled), the mean over the members; for CLIP's features (batch, projection)
    hidden_states: one (batch, members, tokens, hidden) per layer and for the embeddings, where asked for
    attentions: one (batch, heads of all members, or of the trunk, tokens, tokens) per layer, where asked for
    member_last_hidden_state: (batch, members, tokens, hidden)
    member_pooler_output: (batch, members, pooled); for CLIP's features (batch, members, projection)
    """

    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    member_last_hidden_state: torch.FloatTensor | None = None
    member_pooler_output: torch.FloatTensor | None = None


@dataclass
class HydraClassifierOutput(ModelOutput):
    """What a classifier returns.

    loss: scalar, where labels were given
    logits: (batch, classes), the log of the members' mean probability
    member_logits: (batch, members, classes)
    hidden_states: one (batch, members, tokens, hidden) per layer and for the embeddings, where asked for
    attentions: one (batch, heads of all members, or of the trunk, tokens, tokens) per layer, where asked for
    detector_score, abstain, prediction_set: what a calibrated model decides, see `decision.Decided`; its logits are
        divided by its temperature
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    member_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    detector_score: torch.FloatTensor | None = None
    abstain: torch.BoolTensor | None = None
    prediction_set: torch.BoolTensor | None = None


class HydraClassifierMixin:
    """A head per member on a fused encoder: `logits` is the ensemble's answer, `member_logits` each member's.

    A family says what its head reads of the states and how it answers, where that is not the usual.
    """

    # Whether the head reads the first token's state alone, so that the last layer need not compute the others.
    reads_first_token = True

    def read(self, states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        """What the head reads: (members, batch, tokens or 1, hidden) and (members, batch, pooled) -> (members, batch,
        features)"""
        return states[:, :, 0] if pooled is None else pooled

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """What the head's last map reads of that: (members, batch, features) -> (members, batch, prepared)"""
        return features

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """(members, batch, features) -> (members, batch, classes)"""
        return self.classifier(self.prepare(features))

    def answer(self, labels: torch.Tensor | None, inputs: dict, **kwargs) -> HydraClassifierOutput:
        """The encoder on `inputs`, and what the members make of it."""
        if self.reads_first_token and not wants_every_token(self.config, kwargs):
            inputs = inputs | {"first_token_only": True}
        is_calibrated = self.is_calibrated
        outputs: HydraModelOutput = self.base_model(**inputs, members_only=True, return_dict=True, **kwargs)
        states, pooled = outputs.member_last_hidden_state, outputs.member_pooler_output
        features = self.read(states.transpose(0, 1), None if pooled is None else pooled.transpose(0, 1))
        member_logits = batch_first(self.classify(features), self.num_members)
        settle_problem_type(self.config)
        loss = None
        if labels is not None:
            loss = ensemble_loss(self.loss_function, labels, member_logits, self.config, **kwargs)
        decided = {}
        if is_calibrated:
            prepared = batch_first(self.prepare(features), self.num_members) if self.decision.reads_features else None
            decided = vars(self.decision(member_logits, prepared))
            member_logits = decided.pop("member_logits")
        logits = ensemble_logits(member_logits, self.config.problem_type)
        if loss is None and self.training and self.num_members > 1 and self.config.ensemble_loss == "members":
            watch_for_other_loss(logits, from_trainer="num_items_in_batch" in kwargs)
        return HydraClassifierOutput(
            loss=loss,
            logits=logits,
            member_logits=member_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **decided,
        )


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
    check_labels(labels, member_logits, config.problem_type)
    if config.ensemble_loss == "members":
        return mean_loss(loss_function, labels, member_logits.unbind(dim=1), config, **kwargs)
    return mean_loss(loss_function, labels, [ensemble_logits(member_logits, config.problem_type)], config, **kwargs)


def mean_loss(loss_function: Callable, labels: torch.Tensor, answers: Sequence[torch.Tensor], config, **kwargs):
    """The mean of the losses of several logits (batch, classes).

    kwargs: with `num_items_in_batch`, losses are sums divided by it. Transformers' function sees to that for one label of
        several only, and gives the mean of the batch otherwise
    """
    loss = torch.stack([loss_function(labels, logits, config, **kwargs) for logits in answers]).mean()
    items = kwargs.get("num_items_in_batch")
    if items is None or config.problem_type == "single_label_classification":
        return loss
    return loss * labels.numel() / (items.to(loss.device) if isinstance(items, torch.Tensor) else items)


def check_labels(labels: torch.Tensor, member_logits: torch.Tensor, problem_type: str) -> None:
    """Refuses labels of another kind than the config's problem type, for logits (batch, members, classes)."""
    batch, _, classes = member_logits.shape
    if problem_type == "single_label_classification":
        fits, wanted = labels.numel() == batch and not labels.is_floating_point(), "one class index per row"
    elif problem_type == "multi_label_classification":
        fits, wanted = labels.shape == (batch, classes) and labels.is_floating_point(), "a float per row and class"
    else:
        fits, wanted = labels.numel() == batch * classes, "a number per row and output"
    if not fits:
        raise ValueError(
            f"labels are {labels.dtype} of shape {tuple(labels.shape)}, config.problem_type is {problem_type!r}, which "
            f"takes {wanted}: pass these, or set another config.problem_type"
        )


def watch_for_other_loss(
    logits: torch.Tensor,
    from_trainer: bool,
    wanted: str = "config.ensemble_loss is 'members', a loss for each member",
    otherwise: str = ", or set config.ensemble_loss to 'ensemble'",
) -> None:
    """Tells, in the backward pass, of a loss that somebody computed from the ensemble's logits although the members' losses
    are wanted. Trainer's label smoothing does that, and is stopped; other callers know what they do."""
    if not logits.requires_grad or torch.compiler.is_compiling() or torch.jit.is_tracing():
        return

    def tell(gradient: torch.Tensor) -> None:
        if gradient is None or not gradient.any():
            return  # DDP passes nothing, or zeros, to outputs that no loss was computed from
        message = (
            f"the loss is computed from the ensemble's logits, but {wanted}: compute it from member_logits (for Trainer's "
            "label_smoothing_factor pass compute_loss_func=EnsembleLoss(label_smoothing=...) of hydra_transformers.training)"
            f"{otherwise}"
        )
        if from_trainer:
            raise RuntimeError(message)
        logger.warning_once(message)

    logits.register_hook(tell)


def mean_of_members(states: torch.Tensor) -> torch.Tensor:
    """(members or 1, batch, ...) -> (batch, ...)"""
    return states[0] if states.shape[0] == 1 else states.mean(dim=0)


def at_least_float32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def batch_first(hidden_states: torch.Tensor, num_members: int) -> torch.Tensor:
    """(members or 1, batch, ...) -> (batch, members, ...), a view."""
    return hidden_states.expand(num_members, *hidden_states.shape[1:]).transpose(0, 1)


def wants_every_token(config, kwargs: dict) -> bool:
    """Whether the caller asked for hidden states or attentions, which the last layer then owes for all tokens."""
    names = ("output_hidden_states", "output_attentions")
    return any(kwargs.get(name, getattr(config, name, False)) for name in names)
