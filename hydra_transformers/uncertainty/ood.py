"""Scores that tell inputs unlike the training data from those like it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..models.detection import DETECTORS, Answers, score
from .inputs import as_member_logits, wide_log_softmax, widened


# Those that need nothing but logits; `detector_by_name` also has the others.
OOD_SCORES = tuple(name for name, method in DETECTORS.items() if not method.state)
"""The scores that need no fit, by name: what `ood_score` takes."""
OF_PROBABILITIES = ("msp", "entropy", "mutual_information", "disagreement", "gen")


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
            - `"gen"`: `Σ p̄_c^0.1 (1 - p̄_c)^0.1` over the 100 most probable classes, a generalised entropy

    Scores that a fit on training data comes before, and other settings of these: `detector_by_name`.

    Example:
        >>> ood_score([[[4.0, 0.0, 0.0]], [[0.0, 0.0, 0.0]]], method="msp").round(decimals=3)
        tensor([0.0350, 0.6670], dtype=torch.float64)
    """
    member_logits = as_member_logits(member_logits)
    return score_of(member_logits, wide_log_softmax(member_logits), method)


def check_method(method: str) -> None:
    if method in DETECTORS and method not in OOD_SCORES:
        raise ValueError(
            f"{method} needs a fit: pass detector_by_name({method!r}).fit(model, train_data) in place of the name"
        )
    if method not in OOD_SCORES:
        raise ValueError(f"unknown OOD score {method!r}: choose one of {', '.join(OOD_SCORES)}")


def score_of(member_logits: Tensor, log_probabilities: Tensor, method: str) -> Tensor:
    """`ood_score` where the members' log-probabilities are at hand."""
    check_method(method)
    answers = Answers(None if method in OF_PROBABILITIES else widened(member_logits), log_probabilities)
    return score(method, answers)


def check_score(score: Any) -> None:
    """Refuses what is neither the name of a score nor a fitted `Detector`."""
    if isinstance(score, str):
        check_method(score)
    elif hasattr(score, "check_fitted"):
        score.check_fitted()
    else:
        raise TypeError(f"score is a {type(score).__name__}: pass a name, or a Detector of detector_by_name")


def ood_groups(ood_data: Any) -> dict[str, dict[str, Any]]:
    """Group -> name -> data, from one data set, data sets by name, or groups of these."""
    if ood_data is None or ood_data == {}:
        return {}
    if not isinstance(ood_data, Mapping):
        return {"OOD": {"ood_data": ood_data}}
    nested = [isinstance(inner, Mapping) for inner in ood_data.values()]
    if any(nested) and not all(nested):
        raise TypeError(
            'ood_data has data sets beside groups of them: pass {"near": {name: data}, "far": {name: data}}'
        )
    groups = dict(ood_data) if any(nested) else {"OOD": dict(ood_data)}
    for group, sets in groups.items():
        if not sets:
            raise ValueError(f"ood_data has no data sets ({group}): pass at least one, or leave it out")
    return groups
