"""Metrics of an ensemble: accuracy, calibration, diversity, out-of-distribution detection.

Every metric is a function of a few values per sample (`sample_values`), never of all logits at
once, so that data may come batch by batch. Sums are exact (`math.fsum`): the order of the samples,
the batch size and the number of processes change nothing, not even the last digit.
"""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.ensembling import log_mean
from .decomposition import decompose_log_probabilities
from .detectors import Detector, as_detector
from .inputs import as_labels, as_member_logits, as_scores, as_tensor, wide_log_softmax


NUM_BINS = 15
ROWS_PER_PASS = 4096  # bounds the float64 memory, whatever the number of samples


def classification_metrics(member_logits: Any, labels: Any) -> dict[str, float]:
    r"""Accuracy, calibration and selective prediction of the ensemble's mean probability `p̄`.

    With prediction `ŷ = argmax_c p̄_c`, confidence `k = max_c p̄_c` and label `y`, over n samples:

        accuracy  1/n Σ [ŷ = y]
        brier     1/n Σ Σ_c (p̄_c - [c = y])²           summed over classes (0 to 2); some libraries
                  divide by the classes
        nll       1/n Σ -log p̄_y                       of the mean probability, not the mean of the
                  members' losses
        ece       Σ_b n_b/n |accuracy_b - confidence_b|  over 15 equal-width bins of k, [a, b), the
                  last one closed
        aece      the same over 15 bins of equal mass: samples sorted by k and split as evenly as
                  possible, the first bins one longer; samples of equal k share their mean
                  correctness
        aurc      1/n Σ_{i=1..n} risk_i                  risk_i: error rate of the i most confident
                  samples; samples of equal k share their mean error. No trapezoids, and the best
                  possible area is not subtracted

    torchmetrics bins the ECE in the same way, but gives a confidence of exactly 1 a bin of its own.

    Args:
        member_logits (`torch.Tensor`): (samples, members, classes).
        labels (`torch.Tensor`): (samples,), class indices.

    Example:
        >>> metrics = classification_metrics([[[2.0, 0.0]], [[0.0, 1.0]], [[3.0, 0.0]]], [0, 1, 1])
        >>> round(metrics["accuracy"], 3), round(metrics["brier"], 3)
        (0.667, 0.663)
    """
    member_logits = as_member_logits(member_logits)
    labels = as_labels(labels, len(member_logits), member_logits.shape[-1])
    return summarize_classification(sample_values(member_logits, labels))


def diversity_metrics(member_logits: Any) -> dict[str, float]:
    """How much the members of logits (samples, members, classes) differ, 0 for one member, or for
    members that agree: the mean of `decompose`'s epistemic part, in nats, and of its disagreement
    (the disagreement index)."""
    return summarize_diversity(sample_values(as_member_logits(member_logits)))


def ood_metrics(id_scores: Any, ood_scores: Any) -> dict[str, float]:
    """How well scores separate two data sets; out of distribution is the positive class, and scores
    higher.

        auroc  share of (OOD, ID) pairs in which the OOD sample scores higher, ties counting one
               half
        aupr   average precision, Σ_t (recall_t - recall_{t-1}) precision_t over the scores t,
               highest first, not interpolated
        fpr95  share of ID samples at or above the highest score at which at least 95 % of the OOD
               samples are found (the first recall >= 0.95; some libraries take the recall nearest
               to 0.95)

    Args:
        id_scores (`torch.Tensor`): (samples,), in distribution.
        ood_scores (`torch.Tensor`): (samples,), out of distribution.

    Example:
        >>> ood_metrics(id_scores=[0.1, 0.2, 0.6], ood_scores=[0.5, 0.8])["auroc"]
        0.8333333333333334
    """
    hits, false_alarms = detection_counts(id_scores, ood_scores)
    num_ood = int(hits[-1])
    num_id = int(false_alarms[-1])
    new_hits = hits.diff(prepend=hits.new_zeros(1))
    new_false = false_alarms.diff(prepend=hits.new_zeros(1))
    precision = hits.double() / (hits + false_alarms)
    # Twice the pairs in which the OOD sample scores higher, ties counting one half: an integer.
    pairs = new_false * (2 * hits - new_hits)
    is_recalled = 100 * hits >= 95 * num_ood
    at_recall = int(is_recalled.nonzero()[0])
    return {
        "auroc": int(pairs.sum()) / (2 * num_id * num_ood),
        "aupr": math.fsum((new_hits * precision).tolist()) / num_ood,
        "fpr95": int(false_alarms[at_recall]) / num_id,
    }


def detection_counts(id_scores: Any, ood_scores: Any) -> tuple[Tensor, Tensor]:
    """How many OOD and ID samples (integers) score at or above each distinct score, highest
    first."""
    id_scores = as_scores(id_scores, "id_scores")
    ood_scores = as_scores(ood_scores, "ood_scores")
    scores = torch.cat([id_scores, ood_scores])
    is_ood = torch.arange(len(scores), device="cpu") >= len(id_scores)
    return counts_from_the_top(scores, is_ood)


def counts_from_the_top(scores: Tensor, is_positive: Tensor) -> tuple[Tensor, Tensor]:
    """How many positive and how many negative samples score at or above each distinct score,
    highest first."""
    distinct, place = scores.unique(return_inverse=True)
    positives = place[is_positive].bincount(minlength=len(distinct))
    negatives = place[~is_positive].bincount(minlength=len(distinct))
    return positives.flip(0).cumsum(0), negatives.flip(0).cumsum(0)


def sample_values(
    member_logits: Tensor, labels: Tensor | None = None, score: str | Detector = "msp", features: Tensor | None = None
) -> dict[str, Tensor]:
    """The values per sample that all metrics are made of: (samples,) each, float64, on the CPU.

    confidence, total, aleatoric, epistemic, disagreement, score; with labels also correct, brier,
    nll. `score` is a name, see `ood_score`, or a `Detector`.
    """
    detector = as_detector(score)
    member_logits = member_logits.detach()
    passes = []
    for start in range(0, max(1, len(member_logits)), ROWS_PER_PASS):
        rows = slice(start, start + ROWS_PER_PASS)
        labels_of_rows = None
        if labels is not None:
            labels_of_rows = labels[rows]
        features_of_rows = None
        if features is not None:
            features_of_rows = features[rows]
        passes.append(_values(member_logits[rows], labels_of_rows, features_of_rows, detector))

    joined = {}
    for name in passes[0]:
        joined[name] = torch.cat([values[name].cpu() for values in passes])
    return joined


def _values(
    member_logits: Tensor, labels: Tensor | None, features: Tensor | None, detector: Detector
) -> dict[str, Tensor]:
    log_probabilities = wide_log_softmax(member_logits)
    parts = decompose_log_probabilities(log_probabilities)
    values = {
        "confidence": parts.confidence,
        "total": parts.total,
        "aleatoric": parts.aleatoric,
        "epistemic": parts.epistemic,
        "disagreement": parts.disagreement,
        "score": detector(member_logits, features),
    }
    if labels is None:
        return values
    labels = labels.to(parts.prediction.device).unsqueeze(1)
    minus_one = -torch.ones_like(labels, dtype=torch.float64)
    residual = parts.mean_probabilities.scatter_add(1, labels, minus_one)
    return values | {
        "correct": (parts.prediction == labels.squeeze(1)).double(),
        "brier": residual.square().sum(dim=1),
        # Not the log of the mean probability, which may be too small for a float.
        "nll": 0 - log_mean(log_probabilities).gather(1, labels).squeeze(1),
    }


def summarize_classification(values: Mapping[str, Tensor]) -> dict[str, float]:
    """`classification_metrics` from the values of each sample."""
    confidence = values["confidence"]
    correct = values["correct"]
    _, risks = error_coverage_curve(confidence, 1 - correct)
    if values["nll"].isinf().any():
        warnings.warn("nll is infinite: a label has probability exactly 0 (logit -inf)", stacklevel=3)
    return {
        "accuracy": exact_mean(correct),
        "brier": exact_mean(values["brier"]),
        "nll": exact_mean(values["nll"]),
        "ece": expected_calibration_error(confidence, correct),
        "aece": adaptive_calibration_error(confidence, correct),
        "aurc": exact_mean(risks),
    }


def summarize_diversity(values: Mapping[str, Tensor]) -> dict[str, float]:
    """`diversity_metrics` from the values of each sample."""
    return {"mutual_information": exact_mean(values["epistemic"]), "disagreement": exact_mean(values["disagreement"])}


def exact_mean(values: Tensor) -> float:
    """The mean, rounded once: independent of the order of the values."""
    return math.fsum(values.tolist()) / len(values)


def calibration_bins(confidence: Tensor, num_bins: int = NUM_BINS) -> Tensor:
    """The equal-width bin (samples,) each confidence falls into: [a, b), the last one closed."""
    edges = torch.linspace(0, 1, num_bins + 1, dtype=confidence.dtype, device=confidence.device)
    edge_above = torch.bucketize(confidence.contiguous(), edges, right=True)
    return (edge_above - 1).clamp(0, num_bins - 1)


def expected_calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> float:
    """ECE from each sample's confidence and correctness (samples,); see
    `classification_metrics`."""
    bins = calibration_bins(confidence, num_bins)
    gaps = correct - confidence
    # n_b/n |accuracy_b - confidence_b| = |sum of the bin's gaps| / n
    sums = [math.fsum(gaps[bins == number].tolist()) for number in range(num_bins)]
    return math.fsum(map(abs, sums)) / len(gaps)


def adaptive_calibration_error(confidence: Tensor, correct: Tensor, num_bins: int = NUM_BINS) -> float:
    """Adaptive ECE from each sample's confidence and correctness (samples,); see
    `classification_metrics`.

    With fewer samples than bins, every sample is a bin of its own (and a warning says so).
    """
    if len(confidence) < num_bins:
        warnings.warn(
            f"{len(confidence)} samples are fewer than the {num_bins} calibration bins: ece and aece say little, pass "
            "more",
            stacklevel=4,
        )
    confidence, order = confidence.sort()
    gaps = _mean_of_ties(confidence, correct[order]) - confidence
    sums = [math.fsum(part.tolist()) for part in gaps.tensor_split(min(num_bins, len(gaps)))]
    return math.fsum(map(abs, sums)) / len(gaps)


def error_coverage_curve(confidence: Tensor, errors: Tensor) -> tuple[Tensor, Tensor]:
    """Coverage i/n and risk_i (samples,), the mean error of the i most confident samples, for i = 1
    .. n."""
    confidence, order = confidence.sort(descending=True)
    errors = _mean_of_ties(confidence, errors[order])
    accepted = torch.arange(1, len(errors) + 1, dtype=torch.float64, device=errors.device)
    return accepted / len(errors), errors.cumsum(0) / accepted


def _mean_of_ties(sorted_keys: Tensor, values: Tensor) -> Tensor:
    """Give samples of equal key their mean value: what a random order among them gives on
    average."""
    _, place, counts = sorted_keys.unique_consecutive(return_inverse=True, return_counts=True)
    sums = torch.zeros(len(counts), dtype=values.dtype, device=values.device).index_add(0, place, values)
    return (sums / counts)[place]


def compute_metrics(prediction: Any) -> dict[str, float]:
    """The classification and diversity metrics of an evaluation:
    `Trainer(..., compute_metrics=compute_metrics)`.

    Args:
        prediction (`EvalPrediction`): what `Trainer` passes.

    Trainer passes on the logits alone by default; the members come with
    `trainer.evaluate(ignore_keys=[])` and `trainer.train(ignore_keys_for_eval=[])`. From logits
    alone the diversity metrics are left out, with a warning.
    """
    outputs = prediction.predictions
    if not isinstance(outputs, (tuple, list)):
        outputs = [outputs]
    tensors = [as_tensor(output) for output in outputs if not isinstance(output, (tuple, list))]

    # Hidden states may come along: the member logits have the logits' rows and classes.
    logits = tensors[0]
    rows, classes = logits.shape[0], logits.shape[-1]
    for tensor in tensors:
        if tensor.dim() == 3 and tensor.shape[0] == rows and tensor.shape[2] == classes:
            return classification_metrics(tensor, prediction.label_ids) | diversity_metrics(tensor)
    warnings.warn(
        "Trainer handed over logits without member_logits, so mutual_information and disagreement are left out: call "
        "trainer.evaluate(ignore_keys=[]) and trainer.train(ignore_keys_for_eval=[])",
        stacklevel=2,
    )
    return classification_metrics(logits.unsqueeze(1), prediction.label_ids)
