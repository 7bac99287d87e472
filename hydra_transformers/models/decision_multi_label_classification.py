"""The decision of a multi-label model: a temperature, a threshold per label, the labels that a row may have, when to abstain."""

import math

import torch
from torch import Tensor

from .decision import Decision, DecisionOutput
from .ensembling import at_least_float32, entropy_split
from .multi_label_classification import label_log_probabilities, logit_of_mean_probability


ROUNDING = 1e-6  # of log-odds


class TaskDecision(Decision):
    """settings, beside those of every task
    temperature: what logits are divided by
    log_odds: of each label, from where on it is predicted
    set_log_odds: of each label, from where on it is in the set; None without sets

    `detector_score` is the sum of the labels' entropies.
    """

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> DecisionOutput:
        """member_logits: (batch, members, labels)"""
        member_logits = at_least_float32(member_logits) / self.settings["temperature"]
        log_odds = logit_of_mean_probability(member_logits)
        beyond = log_odds - self.per_output("log_odds", log_odds)
        detector_score = entropy_split(label_log_probabilities(member_logits))[0].sum(dim=-1)
        chosen = None
        if self.settings["set_log_odds"] is not None:
            lowest = [_rounded_down(float(value)) for value in self.settings["set_log_odds"]]
            lowest = torch.tensor(lowest, dtype=log_odds.dtype, device=log_odds.device)
            chosen = (log_odds >= lowest) | log_odds.isnan()
        abstain = self.above_threshold(detector_score)
        return DecisionOutput(member_logits, detector_score, abstain, chosen, chosen_labels=beyond >= 0)


def _rounded_down(log_odds: float) -> float:
    """In doubt a label is in the set."""
    return log_odds - ROUNDING * (1 + abs(log_odds)) if math.isfinite(log_odds) else log_odds
