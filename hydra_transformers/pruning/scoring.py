"""The score of a circuit: accuracy, separability of out-of-distribution data, or the mean of the two (D.1.2).

Scores are ratios of whole numbers, so candidates that do equally well have exactly equal scores and ties are real ties.
"""

import torch
from torch import Tensor, nn

from ..models.ensembling import at_least_float32


OBJECTIVES = ("acc", "ood", "avg")


def confidence_and_correctness(logits: Tensor, labels: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Maximum softmax probability and whether the prediction is right: (candidates, batch, classes) -> (candidates, batch)"""
    logits = at_least_float32(logits)
    confidence = nn.functional.softmax(logits, dim=-1).amax(dim=-1)
    return confidence, None if labels is None else logits.argmax(dim=-1) == labels


def auroc_of_confidence(id_confidence: Tensor, ood_confidence: Tensor) -> list[float]:
    """The share of (OOD, ID) pairs in which the OOD sample is less confident, ties counting one half, per candidate.

    id_confidence: (candidates, ID samples); ood_confidence: (candidates, OOD samples)
    """
    ordered = id_confidence.sort(dim=-1).values
    below = torch.searchsorted(ordered, ood_confidence.contiguous())
    not_above = torch.searchsorted(ordered, ood_confidence.contiguous(), right=True)
    # Every ID sample above counts two, every equal one counts one.
    pairs = (2 * ordered.shape[-1] - below - not_above).sum(dim=-1)
    return [count / (2 * ordered.shape[-1] * ood_confidence.shape[-1]) for count in pairs.tolist()]


def objective_scores(
    objective: str, id_confidence: Tensor, correct: Tensor | None, ood_confidence: Tensor | None
) -> list[float]:
    """The score of each candidate, from values (candidates, samples)."""
    if objective == "ood":
        return auroc_of_confidence(id_confidence, ood_confidence)
    accuracy = [count / correct.shape[-1] for count in correct.sum(dim=-1).tolist()]
    if objective == "acc":
        return accuracy
    auroc = auroc_of_confidence(id_confidence, ood_confidence)
    return [(a + b) / 2 for a, b in zip(accuracy, auroc, strict=True)]


def chance_score(objective: str, num_classes: int) -> float:
    """What guessing scores: accuracy 1 / classes, AUROC one half."""
    return {"acc": 1 / num_classes, "ood": 0.5, "avg": (1 / num_classes + 0.5) / 2}[objective]
