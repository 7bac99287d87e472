"""Changes of metrics from one model to another on the same rows, with their sampling errors.

Both models answer the same rows, so each row is compared with itself, and its difficulty cancels out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .metrics import exact_mean


NORMAL_95 = 1.96  # how many standard errors lie on either side of a 95 % interval


@dataclass(frozen=True)
class Change:
    """The change of a metric, after minus before, and its 95 % interval over other rows of the same distribution."""

    difference: float
    low: float
    high: float


def mean_change(before: Tensor, after: Tensor) -> Change:
    """The change of the mean of a value per row (samples,); the standard error is that of the rows' differences."""
    change = after - before
    if not change.isfinite().all():  # an infinite NLL
        return Change(float(change.mean()), -math.inf, math.inf)
    return _around(exact_mean(change), _squared_error(change))


def accuracy_change(before: Tensor, after: Tensor) -> Change:
    """The change of the accuracy, from 1 (right) and 0 (wrong) per row (samples,).

    Bonett and Price's interval: Wald's with one more row won and one more lost, so that a few rows without a change do not
    make the interval empty.
    """
    rows = len(before)
    won, lost = int((after > before).sum()), int((after < before).sum())
    share_won, share_lost = (won + 1) / (rows + 2), (lost + 1) / (rows + 2)
    centre = share_won - share_lost
    reach = NORMAL_95 * math.sqrt((share_won + share_lost - centre**2) / (rows + 2))
    return Change((won - lost) / rows, centre - reach, centre + reach)


def auroc_change(id_before: Tensor, id_after: Tensor, ood: Sequence[tuple[Tensor, Tensor]]) -> Change:
    """The change of the mean AUROC over several OOD sets, with DeLong's interval for paired curves.

    id_before, id_after: (samples,), the scores of the known data
    ood: for each OOD set its scores before and after
    """
    of_id, of_ood = [], []  # the part of each known row, and of each row of each OOD set, in the change
    for before, after in ood:
        of_ood.append(_share_below(after, id_after) - _share_below(before, id_before))
        of_id.append(_share_below(id_before, before) - _share_below(id_after, after))
    parts = [torch.stack(of_id).mean(dim=0), *(part / len(ood) for part in of_ood)]
    difference = math.fsum(map(exact_mean, of_ood)) / len(ood)
    return _around(difference, math.fsum(map(_squared_error, parts)))


def _share_below(scores: Tensor, others: Tensor) -> Tensor:
    """The share of `others` below each of the scores (samples,), ties counting one half."""
    scores, others = scores.contiguous(), others.sort().values
    twice = torch.searchsorted(others, scores) + torch.searchsorted(others, scores, right=True)
    return twice.double() / (2 * len(others))


def _squared_error(values: Tensor) -> float:
    """The squared standard error of the mean; infinite for a single value."""
    return float(values.double().var()) / len(values) if len(values) > 1 else math.inf


def _around(difference: float, squared_error: float) -> Change:
    reach = NORMAL_95 * math.sqrt(squared_error)
    return Change(difference, difference - reach, difference + reach)
