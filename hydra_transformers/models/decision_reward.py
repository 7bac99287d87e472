"""The decision of a reward model or reranker: a score below which nothing is relevant."""

from torch import Tensor

from .decision import Decision, DecisionOutput
from .ensembling import at_least_float32
from .regression import aggregated


class TaskDecision(Decision):
    """`detector_score` is the score with the opposite sign: scores below the threshold are not answered."""

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> DecisionOutput:
        """member_logits: (batch, members, 1)"""
        member_logits = at_least_float32(member_logits)
        low = -aggregated(member_logits, self.settings["config"]["aggregate"]).squeeze(-1)
        return DecisionOutput(member_logits, low, self.above_threshold(low))
