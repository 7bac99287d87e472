"""Conformal prediction: for each row a set of classes that holds the right one with a promised probability."""

import math
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..models.decision_single_label_classification import prediction_sets
from ..models.modeling_hydra import log_mean
from .abstention import SHIFT, check_share, exact
from .inputs import as_labels, as_member_logits, wide_log_softmax


ROWS_PER_PASS = 4096  # bounds the float64 memory, whatever the number of samples


@dataclass(frozen=True)
class ConformalSets:
    """Sets of classes, `{c: 1 - p̄_c <= threshold}`, that hold the right class for a share 1 - alpha of new rows. Made by
    `fit`. A set holds at least the likeliest class.

    Attributes:
        alpha (`float`): the share of new rows whose right class may be missing.
        threshold (`float`): infinite where the rows were too few.
        num_classes (`int`): of the model.
        rows (`int`): how many rows it was fitted on.
    """

    alpha: float
    threshold: float
    num_classes: int
    rows: int

    @classmethod
    def fit(cls, member_logits: Any, labels: Any, alpha: float = 0.1) -> "ConformalSets":
        r"""Calibrates on rows that neither the model nor its temperature was fitted on.

        The score 1 - p̄_c, of the ensemble's mean probability `p̄`, says how badly class c fits a row; it has the smallest sets
        on average (LAC; Sadinle et al., 2019). The threshold is the `ceil((n + 1)(1 - alpha))`-th smallest of the n scores of
        the right classes. If rows are exchangeable, a new row's set holds its class with probability at least 1 - alpha, on
        average over calibration sets and rows; not for the rows of one class, and not under distribution shift. The share that
        one calibration set of n rows reaches is distributed as Beta(k, n + 1 - k) with k as above: ± 2 % for 1000 rows and
        alpha 0.1.

        Args:
            member_logits: (samples, members, classes), scaled by the temperature that will be used.
            labels: (samples,), class indices.
            alpha (`float`, *optional*, defaults to 0.1): the share of sets that may miss the right class.

        Example:
            >>> logits = torch.tensor([[[1.0, 0.0, -1.0]]]).repeat(19, 1, 1)
            >>> sets = ConformalSets.fit(logits, [0] * 15 + [1] * 4, alpha=0.1)
            >>> sets.sets([[[2.0, 0.0, 0.0]], [[1.0, 0.9, -3.0]]]).int()
            tensor([[1, 0, 0],
                    [1, 1, 0]], dtype=torch.int32)
        """
        check_share(alpha, "alpha")
        member_logits = as_member_logits(member_logits).detach()
        num_classes = member_logits.shape[-1]
        labels = as_labels(labels, len(member_logits), num_classes).to(member_logits.device)
        parts = []
        for logits, targets in zip(member_logits.split(ROWS_PER_PASS), labels.split(ROWS_PER_PASS), strict=True):
            scores = 1 - _mean_probabilities(logits)
            parts.append(scores.gather(1, targets.to(scores.device).unsqueeze(1)).squeeze(1).cpu())
        threshold = conformal_quantile(torch.cat(parts), alpha)
        if threshold == math.inf:
            warnings.warn(too_few_rows(alpha, len(labels)), stacklevel=2)
        return cls(float(alpha), threshold, num_classes, len(labels))

    def sets(self, member_logits: Any) -> Tensor:
        """Which classes are in each row's set: bool, (batch, classes)."""
        member_logits = as_member_logits(member_logits).detach()
        if member_logits.shape[-1] != self.num_classes:
            raise ValueError(f"member_logits has {member_logits.shape[-1]} classes, the sets have {self.num_classes}")
        passes = map(_mean_probabilities, member_logits.split(ROWS_PER_PASS))
        parts = [prediction_sets(part, self.threshold, rounding=0.0) for part in passes]
        return torch.cat(parts).to(member_logits.device)

    @property
    def sentence(self) -> str:
        """What is promised for new rows, under which conditions, and whether there were too few rows for it."""
        note = f" {too_few_rows(self.alpha, self.rows)}" if self.threshold == math.inf else ""
        return (
            f"For at least {100 * (1 - self.alpha):.6g} % of the rows the set holds the right class, on average over calibration "
            f"sets, if new rows are exchangeable with the {self.rows} calibration rows. {SHIFT}{note}"
        )


def too_few_rows(alpha: float, rows: int) -> str:
    """A note for sets that hold everything."""
    least = math.ceil(1 / exact(alpha)) - 1
    return f"alpha={alpha:g} takes at least {least} calibration rows, there are {rows}: every set holds every class."


def conformal_quantile(scores: Tensor, alpha: float) -> float:
    """The ceil((n + 1)(1 - alpha))-th smallest score; infinite if there are fewer."""
    rank = math.ceil((len(scores) + 1) * (1 - exact(alpha)))
    return float(scores.kthvalue(rank).values) if rank <= len(scores) else math.inf


def _mean_probabilities(member_logits: Tensor) -> Tensor:
    return log_mean(wide_log_softmax(member_logits)).exp()
