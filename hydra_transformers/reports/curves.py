"""The curves behind the plots, thinned to a few hundred points so that a report stays small."""

import math

import torch
from torch import Tensor

from ..uncertainty.metrics import NUM_BINS, calibration_bins, detection_counts, error_coverage_curve, exact_mean


POINTS = 256
HISTOGRAM_BINS = 30


def reliability_curve(confidence: Tensor, correct: Tensor) -> dict[str, list]:
    """Per equal-width bin: mean confidence, accuracy (both `None` in an empty bin) and share of the samples."""
    bins = calibration_bins(confidence)
    members = [bins == b for b in range(NUM_BINS)]
    return {
        "confidence": [exact_mean(confidence[chosen]) if chosen.any() else None for chosen in members],
        "accuracy": [exact_mean(correct[chosen]) if chosen.any() else None for chosen in members],
        "share": [int(chosen.sum()) / len(bins) for chosen in members],
    }


def risk_curve(confidence: Tensor, correct: Tensor) -> dict[str, list[float]]:
    """Coverage and risk, see `error_coverage_curve`."""
    coverage, risk = error_coverage_curve(confidence, 1 - correct)
    chosen = _thinned(len(risk))
    return {"coverage": coverage[chosen].tolist(), "risk": risk[chosen].tolist()}


def roc_curve(id_scores: Tensor, ood_scores: Tensor) -> dict[str, list[float]]:
    """False and true positive rate from (0, 0) to (1, 1), out of distribution being positive."""
    hits, false_alarms = detection_counts(id_scores, ood_scores)
    chosen = _thinned(len(hits))
    return {
        "fpr": [0.0, *(false_alarms[chosen] / false_alarms[-1]).tolist()],
        "tpr": [0.0, *(hits[chosen] / hits[-1]).tolist()],
    }


def score_histograms(id_scores: Tensor, ood_scores: dict[str, Tensor]) -> dict[str, list[float] | dict]:
    """Share of each data set's samples per bin; all data sets share the bins' edges."""
    scores = torch.cat([id_scores, *ood_scores.values()])
    finite = scores[scores.isfinite()]
    low, high = (float(finite.min()), float(finite.max())) if len(finite) else (0.0, 1.0)
    if not low < high or math.isclose(low, high, rel_tol=1e-12):
        low, high = low - 0.5, high + 0.5
    edges = torch.linspace(low, high, HISTOGRAM_BINS + 1, dtype=torch.float64, device=scores.device)

    def shares(scores: Tensor) -> list[float]:
        place = (torch.bucketize(scores.contiguous(), edges, right=True) - 1).clamp(0, HISTOGRAM_BINS - 1)
        return (place.bincount(minlength=HISTOGRAM_BINS) / len(scores)).tolist()

    return {
        "edges": edges.tolist(),
        "id": shares(id_scores),
        "ood": {name: shares(scores) for name, scores in ood_scores.items()},
    }


def _thinned(length: int) -> Tensor:
    return torch.linspace(0, length - 1, min(length, POINTS), dtype=torch.float64, device="cpu").round().long()
