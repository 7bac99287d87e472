"""Scores that tell inputs unlike the training data from those like it."""

from typing import Any

from torch import Tensor

from .decomposition import Decomposition, decompose
from .inputs import as_member_logits, widened


OOD_SCORES = ("msp", "max_logit", "energy", "entropy", "mutual_information", "disagreement")


def ood_score(member_logits: Any, method: str = "msp") -> Tensor:
    """How far out of distribution each sample looks, (batch,) in float64; higher means more out of distribution.

    For models that choose one of several classes, not for multi-label ones.

    Args:
        member_logits: (batch, members, classes).
        method: how the members' logits `z_m` and mean probability `p̄` become one score:

            - `"msp"`: `1 - max_c p̄_c`, the maximum softmax probability of the ensemble (the paper's score)
            - `"entropy"`: `H(p̄)`, the entropy of the mean probability
            - `"max_logit"`: `-1/M Σ_m max_c z_mc`, the mean over members of each member's score
            - `"energy"`: `-1/M Σ_m log Σ_c exp z_mc`, the mean over members of each member's score
            - `"mutual_information"`: the epistemic part of the entropy; 0 for a single model
            - `"disagreement"`: share of differing pairs of members; 0 for a single model

    Example:
        >>> ood_score([[[4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]], method="msp").round(decimals=3)
        tensor([0.0350, 0.6670], dtype=torch.float64)
    """
    member_logits = as_member_logits(member_logits)
    return score_of(member_logits, decompose(member_logits), method)


def check_method(method: str) -> None:
    if method not in OOD_SCORES:
        raise ValueError(f"unknown OOD score {method!r}: choose one of {', '.join(OOD_SCORES)}")


def score_of(member_logits: Tensor, parts: Decomposition, method: str) -> Tensor:
    """`ood_score` where the decomposition of the same logits is at hand."""
    check_method(method)
    if method in ("max_logit", "energy"):
        member_logits = widened(member_logits)
        score = member_logits.amax(dim=-1) if method == "max_logit" else member_logits.logsumexp(dim=-1)
        return -score.mean(dim=1)
    if method == "msp":
        return 1 - parts.confidence
    return {
        "entropy": parts.total,
        "mutual_information": parts.epistemic,
        "disagreement": parts.disagreement,
    }[method]
