"""Conformal prediction: for each row a set of classes that holds the right one with a promised
probability."""

import math
import warnings

import torch
from torch import Tensor

from ..models.ensembling import log_mean
from .abstention import SHIFT, exact
from .few_rows import note_on_share
from .inputs import as_labels, as_member_logits, wide_log_softmax


ROWS_PER_PASS = 4096  # bounds the float64 memory, whatever the number of samples


def fit_sets(member_logits: Tensor, labels: Tensor, alpha: float) -> float:
    r"""Return the threshold of sets `{c: 1 - p̄_c <= threshold}` that hold the right class for a
    share 1 - alpha of new rows, infinite, with a warning, where the rows are too few.

    The score 1 - p̄_c, of the ensemble's mean probability `p̄`, says how badly class c fits a row;
    it has the smallest sets on average (LAC; Sadinle et al., 2019). The threshold is the
    `ceil((n + 1)(1 - alpha))`-th smallest of the n scores of the right classes. If rows are
    exchangeable, a new row's set holds its class with probability at least 1 - alpha, on average
    over calibration sets and rows; not for the rows of one class, and not under distribution shift.
    The share that one calibration set of n rows reaches is distributed as Beta(k, n + 1 - k) with k
    as above: ± 2 % for 1000 rows and alpha 0.1.

    member_logits: (samples, members, classes), of rows that neither the model nor its temperature
        was fitted on, scaled by the temperature that will be used
    labels: (samples,), class indices
    """
    member_logits = as_member_logits(member_logits).detach()
    labels = as_labels(labels, len(member_logits), member_logits.shape[-1]).to(member_logits.device)
    parts = []
    for logits, targets in zip(member_logits.split(ROWS_PER_PASS), labels.split(ROWS_PER_PASS), strict=True):
        scores = 1 - log_mean(wide_log_softmax(logits)).exp()
        targets = targets.to(scores.device).unsqueeze(1)
        parts.append(scores.gather(1, targets).squeeze(1).cpu())
    threshold = conformal_quantile(torch.cat(parts), alpha)
    if threshold == math.inf:
        warnings.warn(too_few_rows(alpha, len(labels)), stacklevel=2)
    return threshold


def sets_sentence(alpha: float, rows: int, threshold: float) -> str:
    """Return what is promised for new rows, under which conditions, and whether there were too few
    rows for it."""
    rank = math.ceil((rows + 1) * (1 - exact(alpha)))
    note = note_on_share(rank, rows, "of the sets hold the right class")
    if threshold == math.inf:
        note = too_few_rows(alpha, rows)
    sentence = (
        f"For at least {100 * (1 - alpha):.6g} % of the rows the prediction set holds the right class, on average "
        f"over calibration sets, if new rows are exchangeable with the {rows} calibration rows. {SHIFT}"
    )
    return f"{sentence} {note}".rstrip()


def too_few_rows(alpha: float, rows: int) -> str:
    """Return a note for sets that hold everything."""
    least = math.ceil(1 / exact(alpha)) - 1
    return f"alpha={alpha:g} takes at least {least} calibration rows, there are {rows}: every set holds every class."


def conformal_quantile(scores: Tensor, alpha: float) -> float:
    """Return the ceil((n + 1)(1 - alpha))-th smallest score; infinite if there are fewer."""
    rank = math.ceil((len(scores) + 1) * (1 - exact(alpha)))
    if rank > len(scores):
        return math.inf
    return float(scores.kthvalue(rank).values)
