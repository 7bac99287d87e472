"""The score of a circuit: accuracy, separability of out-of-distribution data, the mean of the two (D.1.2), or the user's metric.

Separability is the AUROC of the maximum softmax probability. Scores are ratios of whole numbers, so
equally good candidates have exactly equal scores. Ties are common where the score is perfect or the data is small, so each score
comes with a margin: how clearly the candidate reached it.
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
from .evaluation_data import check_label_range
from .heads import has_two_towers


OBJECTIVES = ("acc", "ood", "avg")
METRIC = "metric"  # the objective of a circuit for the user's own metric

# (logits (samples, classes), labels (samples, ...)), both on the CPU -> a number, higher is better.
Metric = Callable[[Tensor, Tensor], float]

# Stands for the infinite -log probability of a label with logit -inf, so that margins can be subtracted.
LARGEST_MEAN = 1e30


class Score(NamedTuple):
    """Compared by `value`, then by `margin`; higher is better."""

    value: float
    margin: float


class SampleValues(NamedTuple):
    """What scores are computed from, (candidates, samples) each; the last two need labels.

    confidence: the maximum softmax probability
    """

    confidence: Tensor
    correct: Tensor | None = None
    nll: Tensor | None = None


def sample_values(logits: Tensor, labels: Tensor | None) -> SampleValues:
    """(candidates, batch, classes) -> (candidates, batch) each"""
    logits = at_least_float32(logits)
    confidence = nn.functional.softmax(logits, dim=-1).amax(dim=-1)
    if labels is None:
        return SampleValues(confidence)
    of_label = labels.expand(logits.shape[:-1]).unsqueeze(-1)
    others = logits.scatter(-1, of_label, -torch.inf).logsumexp(dim=-1)
    # log(1 + exp(others - own)) stays exact for confident answers, where log_softmax subtracts nearly equal numbers.
    nll = nn.functional.softplus(others - logits.gather(-1, of_label).squeeze(-1))
    return SampleValues(confidence, logits.argmax(dim=-1) == labels, nll.clamp(max=LARGEST_MEAN))


def auroc_of_confidence(id_confidence: Tensor, ood_confidence: Tensor) -> list[Fraction]:
    """The share of (OOD, ID) pairs in which the OOD sample is less confident, ties counting one half, per candidate.

    id_confidence: (candidates, ID samples); ood_confidence: (candidates, OOD samples)
    """
    ordered = id_confidence.sort(dim=-1).values
    below = torch.searchsorted(ordered, ood_confidence.contiguous())
    not_above = torch.searchsorted(ordered, ood_confidence.contiguous(), right=True)
    # Every ID sample above counts two, every equal one counts one.
    pairs = (2 * ordered.shape[-1] - below - not_above).sum(dim=-1)
    return [Fraction(count, 2 * ordered.shape[-1] * ood_confidence.shape[-1]) for count in pairs.tolist()]


def objective_scores(objective: str, id_values: SampleValues, ood_values: SampleValues | None) -> list[Score]:
    """The score of each candidate."""
    parts = [] if objective == "ood" else [_accuracy(id_values)]
    parts += [] if objective == "acc" else [_separability(id_values, ood_values)]
    return [_mean_score(of_candidate) for of_candidate in zip(*parts, strict=True)]


def metric_score(metric: Metric, logits: Tensor, labels: Tensor) -> Score:
    """The user's metric of one candidate's logits (samples, classes)."""
    value = metric(logits, labels)
    if isinstance(value, Tensor) and value.numel() != 1:
        raise TypeError(f"the metric {name_of(metric)} returned {value.numel()} numbers: it has to return one")
    if not math.isfinite(float(value)):
        raise ValueError(f"the metric {name_of(metric)} returned {value}: it has to be a finite number")
    return Score(float(value), 0.0)


def name_of(metric: Metric) -> str:
    return getattr(metric, "__qualname__", type(metric).__qualname__)


# A score before it becomes a float: rounding in sums of floats would break ties.
Exact = tuple[Fraction, Decimal]


def _mean_score(scores: Sequence[Exact]) -> Score:
    values, margins = zip(*scores, strict=True)
    return Score(float(sum(values) / len(values)), float(sum(margins) / len(margins)))


def _accuracy(id_values: SampleValues) -> list[Exact]:
    samples = id_values.correct.shape[-1]
    counts, nlls = id_values.correct.sum(dim=-1).tolist(), _means(id_values.nll)
    return [(Fraction(count, samples), -nll) for count, nll in zip(counts, nlls, strict=True)]


def _separability(id_values: SampleValues, ood_values: SampleValues) -> list[Exact]:
    aurocs = auroc_of_confidence(id_values.confidence, ood_values.confidence)
    known, unknown = _means(id_values.confidence), _means(ood_values.confidence)
    return [(auroc, k - u) for auroc, k, u in zip(aurocs, known, unknown, strict=True)]


def _means(values: Tensor) -> list[Decimal]:
    """(candidates, samples) -> the mean of each candidate to four digits: batching changes the last digits of logits, and heads
    without effect must stay equal."""
    means = values.cpu().double().mean(dim=-1).clamp(-LARGEST_MEAN, LARGEST_MEAN)
    return [Decimal(f"{mean:.3e}") for mean in means.tolist()]


def chance_score(objective: str, num_classes: int) -> float:
    """What guessing scores: accuracy 1 / classes, AUROC one half."""
    return {"acc": 1 / num_classes, "ood": 0.5, "avg": (1 / num_classes + 0.5) / 2}[objective]


def minus_loss_of(model: PreTrainedModel) -> Metric:
    """Minus the loss that the model is trained with, over all samples."""
    problem = getattr(model.config, "problem_type", None)
    if problem is None and not has_two_towers(model) and model.config.num_labels == 1:
        problem = "regression"

    def minus_loss(logits: Tensor, labels: Tensor) -> float:
        if problem == "regression":
            return -nn.functional.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype)).item()
        if problem == "multi_label_classification":
            return -nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)).item()
        if labels.is_floating_point() or labels.dim() > 1:
            raise ValueError(
                f"the labels are {labels.dtype} of shape {tuple(labels.shape)}: pass class indices, one for each row, set "
                "config.problem_type, or pass a metric"
            )
        check_label_range(labels, "data", logits.shape[-1])
        return -nn.functional.cross_entropy(logits, labels).item()

    minus_loss.__qualname__ = "minus_loss"  # its name in circuits
    return minus_loss
