"""The decision of a token classifier: a temperature, and how unsure a token may be."""

from torch import Tensor

from .decision import Decision, DecisionOutput
from .ensembling import at_least_float32, log_mean_probability


class TaskDecision(Decision):
    """settings, beside those of every task
    temperature: what logits are divided by

    `detector_score` and `abstain` are (batch, tokens), of 1 - the probability of each token's likeliest class. An entity is
    answered if none of its words is above the threshold.
    """

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> DecisionOutput:
        """member_logits: (batch, members, tokens, classes)"""
        member_logits = at_least_float32(member_logits) / self.settings["temperature"]
        detector_score = 1 - log_mean_probability(member_logits).exp().amax(dim=-1)
        return DecisionOutput(member_logits, detector_score, self.above_threshold(detector_score))
