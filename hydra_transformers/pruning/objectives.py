"""The score of a circuit: accuracy, separability, the mean of the two (D.1.2), or a metric.

Separability of out-of-distribution data is the AUROC of the maximum softmax probability. Scores are
ratios of whole numbers, so equally good candidates have exactly equal scores. Ties are common where
the score is perfect or the data is small, so each score comes with a margin: how clearly the
candidate reached it.
"""

import math
from collections.abc import Callable, Sequence
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.ensembling import at_least_float32
from ..models.task import task_of_config
from .evaluation_data import check_label_range


OBJECTIVES = ("acc", "ood", "avg")
METRIC = "metric"  # the objective of a circuit for the user's own metric

# (logits (samples, classes), labels (samples, ...)), both on the CPU -> a number, higher is better.
Metric = Callable[[Tensor, Tensor], float]

# Stands for the infinite -log probability of a label with logit -inf, so that margins can be
# subtracted.
LARGEST_MEAN = 1e30


class Score(NamedTuple):
    """Compared by `value`, then by `margin`; higher is better."""

    value: float
    margin: float


class SampleValues(NamedTuple):
    """What scores are computed from, (candidates, samples) each; the last two need labels.

    confidence: the maximum softmax probability
    correct: whether the most probable class is the label
    nll: the negative log-likelihood of the label
    """

    confidence: Tensor
    correct: Tensor | None = None
    nll: Tensor | None = None


def sample_values(logits: Tensor, labels: Tensor | None) -> SampleValues:
    """Return the values of all samples: (candidates, batch, classes) -> (candidates, batch)
    each.
    """
    logits = at_least_float32(logits)
    confidence = nn.functional.softmax(logits, dim=-1).amax(dim=-1)
    if labels is None:
        return SampleValues(confidence)
    correct = logits.argmax(dim=-1) == labels

    # log(1 + exp(others - own)) stays exact for confident predictions, where log_softmax subtracts
    # nearly equal numbers.
    index = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    own = logits.gather(-1, index).squeeze(-1)
    others = logits.scatter(-1, index, -torch.inf).logsumexp(dim=-1)
    nll = nn.functional.softplus(others - own)
    return SampleValues(confidence, correct, nll.clamp(max=LARGEST_MEAN))


def auroc_of_confidence(id_confidence: Tensor, ood_confidence: Tensor) -> list[Fraction]:
    """Return, per candidate, the share of (OOD, ID) pairs whose OOD sample is less confident.

    Ties count one half.

    id_confidence: (candidates, ID samples)
    ood_confidence: (candidates, OOD samples)
    """
    ordered = id_confidence.sort(dim=-1).values
    ood_confidence = ood_confidence.contiguous()
    below = torch.searchsorted(ordered, ood_confidence)
    not_above = torch.searchsorted(ordered, ood_confidence, right=True)

    # Every ID sample above counts two, every equal one counts one.
    id_samples = ordered.shape[-1]
    doubled = (2 * id_samples - below - not_above).sum(dim=-1)
    most = 2 * id_samples * ood_confidence.shape[-1]
    return [Fraction(count, most) for count in doubled.tolist()]


def objective_scores(objective: str, id_values: SampleValues, ood_values: SampleValues | None) -> list[Score]:
    """Return the score of each candidate."""
    parts = []
    if objective != "ood":
        parts.append(_accuracy(id_values))
    if objective != "acc":
        parts.append(_separability(id_values, ood_values))
    return [_mean_score(parts_of_candidate) for parts_of_candidate in zip(*parts, strict=True)]


def metric_score(metric: Metric, logits: Tensor, labels: Tensor) -> Score:
    """Return the user's metric of one candidate's logits (samples, classes)."""
    value = metric(logits, labels)
    name = name_of(metric)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"the metric {name} returned {value.numel()} numbers: it has to return one")
    if not math.isfinite(float(value)):
        raise ValueError(f"the metric {name} returned {value}: it has to be a finite number")
    return Score(float(value), 0.0)


def name_of(metric: Metric) -> str:
    """Return the name of a metric, or of its class."""
    return getattr(metric, "__qualname__", type(metric).__qualname__)


# A score before it becomes a float: rounding in sums of floats would break ties.
Exact = tuple[Fraction, Decimal]


def _mean_score(scores: Sequence[Exact]) -> Score:
    """Return the mean of exact scores as floats."""
    values, margins = zip(*scores, strict=True)
    value = sum(values) / len(values)
    margin = sum(margins) / len(margins)
    return Score(float(value), float(margin))


def _accuracy(id_values: SampleValues) -> list[Exact]:
    """Return, per candidate, the accuracy; its margin is the likelihood of the labels."""
    samples = id_values.correct.shape[-1]
    counts = id_values.correct.sum(dim=-1).tolist()
    nlls = _means(id_values.nll)
    return [(Fraction(count, samples), -nll) for count, nll in zip(counts, nlls, strict=True)]


def _separability(id_values: SampleValues, ood_values: SampleValues) -> list[Exact]:
    """Return, per candidate, the AUROC; its margin is the difference of the mean confidences."""
    aurocs = auroc_of_confidence(id_values.confidence, ood_values.confidence)
    id_means = _means(id_values.confidence)
    ood_means = _means(ood_values.confidence)
    scores = []
    for auroc, id_mean, ood_mean in zip(aurocs, id_means, ood_means, strict=True):
        scores.append((auroc, id_mean - ood_mean))
    return scores


def _means(values: Tensor) -> list[Decimal]:
    """Return the mean of each candidate's values (candidates, samples), to four digits.

    Batching changes the last digits of logits, and heads without effect must stay equal.
    """
    means = values.cpu().double().mean(dim=-1)
    means = means.clamp(-LARGEST_MEAN, LARGEST_MEAN)
    return [Decimal(f"{mean:.3e}") for mean in means.tolist()]


def chance_score(objective: str, num_classes: int) -> float:
    """Return what guessing scores: accuracy 1 / classes, AUROC one half."""
    accuracy = 1 / num_classes
    auroc = 0.5
    return {"acc": accuracy, "ood": auroc, "avg": (accuracy + auroc) / 2}[objective]


def minus_loss_of(model: PreTrainedModel) -> Metric:
    """Return a metric: minus the loss that the model is trained with, over all samples."""
    task = task_of_config(model.config)

    def minus_loss(logits: Tensor, labels: Tensor) -> float:
        if task.predicts_numbers:
            targets = labels.flatten().to(logits.dtype)
            loss = nn.functional.mse_loss(logits.flatten(), targets)
            return -loss.item()
        if not task.chooses_one_class:
            targets = labels.to(logits.dtype)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, targets)
            return -loss.item()
        if labels.is_floating_point() or labels.dim() > 1:
            raise ValueError(
                f"the labels are {labels.dtype} of shape {tuple(labels.shape)}: pass class indices, one for each row, "
                "set config.problem_type, or pass a metric"
            )
        check_label_range(labels, "data", logits.shape[-1])
        loss = nn.functional.cross_entropy(logits, labels)
        return -loss.item()

    minus_loss.__qualname__ = "minus_loss"  # its name in circuits
    return minus_loss
