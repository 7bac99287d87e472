"""The decision of a regression model: intervals, and a width above which nothing is answered."""

import torch
from torch import Tensor

from .decision import Decision, DecisionOutput
from .ensembling import at_least_float32
from .regression import spread


class TaskDecision(Decision):
    """settings, beside those of every task
    floors: of each output, what is added to the members' spread
    factors: of each output, half of its interval's width is so many times the spread with the floor

    `detector_score` is the width of the interval, of several outputs the mean of their widths.
    """

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> DecisionOutput:
        """member_logits: (batch, members, outputs); the interval is (batch, outputs, 2)"""
        member_logits = at_least_float32(member_logits)
        mean, half = member_logits.mean(dim=1), self.per_output("factors", member_logits)
        half = half * (spread(member_logits) + self.per_output("floors", member_logits))
        width = (2 * half).mean(dim=-1)
        interval = torch.stack([mean - half, mean + half], dim=-1)
        return DecisionOutput(member_logits, width, self.above_threshold(width), interval=interval)
