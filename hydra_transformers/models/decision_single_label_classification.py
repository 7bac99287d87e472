"""The decision of a model that chooses one class: a temperature, a detector with its threshold, and prediction sets."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .decision import Decision, DecisionOutput
from .detection import DETECTORS, answers_of, score
from .ensembling import at_least_float32, log_mean_of_exponentials, log_mean_probability


ROUNDING = 1e-6  # of probabilities; in doubt a class is in the set


class TaskDecision(Decision):
    """settings, beside those of every task
    temperature: of the ensemble, see `pool_then_scale`
    detector: {"name", "by", "settings"}, see `detection.score`
    sets: None, or {"method": "lac", "threshold"}
    classes, prompts: of a zero-shot classifier, the names of its classes and a digest of the prompts
    """

    def __init__(self, settings: dict[str, Any], num_parameters: int):
        method, state = DETECTORS.get(settings["detector"].get("name")), tuple(settings["state"])
        if method is None or sorted(state) != sorted(method.state) or settings["detector"].get("by") not in method.by:
            raise ValueError(f"decision.detector is {str(settings['detector'])[:200]}: call calibrate() again")
        super().__init__(settings, num_parameters)
        self.reads_features = bool(method.state)

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> DecisionOutput:
        """member_logits: (batch, members, classes); member_features: (batch, members, dim), where `reads_features`"""
        member_logits = pool_then_scale(at_least_float32(member_logits), self.settings["temperature"])
        detector, threshold, sets = (self.settings[name] for name in ("detector", "threshold", "sets"))
        state = {name: getattr(self, name) for name in self.settings["state"]}
        answers = answers_of(member_logits, member_features, state)
        detector_score = score(detector["name"], answers, detector["by"], **detector["settings"])
        log_probabilities = log_mean_probability(member_logits)
        is_not_a_number = log_probabilities.isnan().any(dim=-1)
        abstain, chosen = is_not_a_number, None
        if threshold is not None:
            abstain = abstain | self.above_threshold(detector_score)
        if sets is not None:
            chosen = prediction_sets(log_probabilities.exp(), sets["threshold"]) | is_not_a_number.unsqueeze(-1)
        return DecisionOutput(member_logits, detector_score, abstain, chosen)


def pool_then_scale(member_logits: Tensor, temperature: float) -> Tensor:
    """Member logits whose mean probability is the ensemble's prediction with a temperature: (batch, members, classes).

    With p the members' mean probability, the prediction is q = softmax(log p / T). Each member is first divided by T alone;
    then its probability of a class is multiplied by what is missing from the mean of all to q, the same factor for all members.
    A member whose probabilities now sum to more than 1 is reduced to 1, and what it loses goes, class by class, to those
    below 1: every member sums to 1 again, and the mean stays q. Each member keeps its log Σ exp z / T.
    """
    scaled = member_logits / temperature
    if member_logits.shape[1] == 1 or temperature == 1:
        return scaled
    smallest = torch.finfo(scaled.dtype).tiny  # keeps logarithms, and their gradients, finite
    sums = scaled.logsumexp(dim=-1, keepdim=True)
    log_members = scaled - sums
    log_mean = log_mean_of_exponentials(log_members)
    factor = (log_mean_probability(member_logits) / temperature).log_softmax(dim=-1) - log_mean
    factor = factor.masked_fill(log_mean == -math.inf, 0.0)  # a class that no member allows
    log_members = log_members + factor.unsqueeze(1)
    log_total = log_members.logsumexp(dim=-1, keepdim=True)  # near 0
    surplus = -torch.expm1(-log_total.clamp(min=0))  # as a share of what the member has
    lack = -torch.expm1(log_total.clamp(max=0))
    lost = (log_members + surplus.clamp(min=smallest).log()).logsumexp(dim=1, keepdim=True)
    shares = lack / lack.sum(dim=1, keepdim=True).clamp(min=smallest)
    received = lost + shares.clamp(min=smallest).log()
    return torch.stack([log_members - log_total.clamp(min=0), received]).logsumexp(dim=0) + sums


def prediction_sets(probabilities: Tensor, threshold: float | str) -> Tensor:
    """The classes that each row may have, bool (batch, classes), of the ensemble's probabilities (batch, classes); at least the
    likeliest."""
    scores = 1 - probabilities
    highest = torch.tensor([float(threshold)], dtype=scores.dtype, device=scores.device)
    chosen = scores <= highest + ROUNDING
    likeliest = nn.functional.one_hot(probabilities.argmax(dim=-1), probabilities.shape[-1]).bool()
    return chosen | (likeliest & ~chosen.any(dim=-1, keepdim=True))
