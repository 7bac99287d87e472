"""The curves behind the plots, thinned to a few hundred points so that a report stays small."""

import math

import torch
from torch import Tensor

from ..uncertainty.metrics import NUM_BINS, calibration_bins, detection_counts, error_coverage_curve, exact_mean


POINTS = 256
HISTOGRAM_BINS = 30


def reliability_curve(confidence: Tensor, correct: Tensor) -> dict[str, list]:
    """Return mean confidence, accuracy and share of the samples of each equal-width bin.

    The first two are `None` in an empty bin.
    """
    bin_of_row = calibration_bins(confidence)
    curve: dict[str, list] = {"confidence": [], "accuracy": [], "share": []}
    for number in range(NUM_BINS):
        is_member = bin_of_row == number
        mean_confidence = None
        accuracy = None
        if is_member.any():
            mean_confidence = exact_mean(confidence[is_member])
            accuracy = exact_mean(correct[is_member])
        curve["confidence"].append(mean_confidence)
        curve["accuracy"].append(accuracy)
        curve["share"].append(int(is_member.sum()) / len(bin_of_row))
    return curve


def risk_curve(confidence: Tensor, correct: Tensor) -> dict[str, list[float]]:
    """Return coverage and risk, see `error_coverage_curve`."""
    coverage, risk = error_coverage_curve(confidence, 1 - correct)
    kept = _thinned(len(risk))
    return {"coverage": coverage[kept].tolist(), "risk": risk[kept].tolist()}


def roc_curve(id_scores: Tensor, ood_scores: Tensor) -> dict[str, list[float]]:
    """Return false and true positive rates from (0, 0) to (1, 1).

    Out of distribution is positive.
    """
    hits, false_alarms = detection_counts(id_scores, ood_scores)
    kept = _thinned(len(hits))
    false_positive_rates = false_alarms[kept] / false_alarms[-1]
    true_positive_rates = hits[kept] / hits[-1]
    return {"fpr": [0.0, *false_positive_rates.tolist()], "tpr": [0.0, *true_positive_rates.tolist()]}


def score_histograms(id_scores: Tensor, ood_scores: dict[str, Tensor]) -> dict[str, list[float] | dict]:
    """Return the share of each data set's samples per bin; all data sets share the bins' edges."""
    # From the lowest to the highest score; scores that are all alike get a bin around them.
    scores = torch.cat([id_scores, *ood_scores.values()])
    finite = scores[scores.isfinite()]
    low = 0.0
    high = 1.0
    if len(finite):
        low = float(finite.min())
        high = float(finite.max())
    if not low < high or math.isclose(low, high, rel_tol=1e-12):
        low -= 0.5
        high += 0.5
    edges = torch.linspace(low, high, HISTOGRAM_BINS + 1, dtype=torch.float64, device=scores.device)

    def shares(scores: Tensor) -> list[float]:
        bins = torch.bucketize(scores.contiguous(), edges, right=True) - 1
        bins = bins.clamp(0, HISTOGRAM_BINS - 1)
        counts = bins.bincount(minlength=HISTOGRAM_BINS)
        return (counts / len(scores)).tolist()

    return {
        "edges": edges.tolist(),
        "id": shares(id_scores),
        "ood": {name: shares(scores) for name, scores in ood_scores.items()},
    }


def _thinned(length: int) -> Tensor:
    """Return indices of at most `POINTS` of so many points, evenly spaced, with both ends."""
    indices = torch.linspace(0, length - 1, min(length, POINTS), dtype=torch.float64, device="cpu")
    return indices.round().long()
