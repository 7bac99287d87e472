"""Decisions of tasks that do not choose one class: what a calibrated model adds to its answers, task by task."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .decision import Decided, Decision
from .decision_settings import check_common, check_field, check_fields, check_threshold, is_positive, is_share
from .modeling_hydra import at_least_float32


class TaskDecision(Decision):
    """A decision that reads the members' outputs alone, and has no detector with tensors of its own.

    settings: beside those of `Decision` that every task has (threshold, alpha, dtype, state, digests, sentences)
        task: the task's name, a key of `DECISIONS`
        detector: {"name"}: what `detector_score` is called in answers
    """

    fields: tuple[str, ...] = ()  # of the task alone
    score_bounds = (-math.inf, math.inf)  # of `detector_score`

    @classmethod
    def check(cls, settings: Any, num_parameters: float) -> None:
        common = ("task", "detector", "threshold", "alpha", "dtype", "state", "digests", "sentences")
        check_fields("decision", settings, (*common, *cls.fields))
        check_fields("decision.detector", settings["detector"], ("name",))
        name, alpha = settings["detector"]["name"], settings["alpha"]
        check_field("detector.name", name, isinstance(name, str), "a name")
        check_threshold(settings["threshold"], *cls.score_bounds)
        check_field("alpha", alpha, alpha is None or is_share(alpha), "a share between 0 and 1, or None")
        check_common(settings, (), num_parameters)

    @property
    def reads_features(self) -> bool:
        return False

    def above_threshold(self, detector_score: Tensor) -> Tensor:
        """Which rows not to answer, bool; none without a threshold but those that are not numbers."""
        threshold = self.settings["threshold"]
        return detector_score.isnan() if threshold is None else ~(detector_score <= float(threshold))

    def numbers(self, name: str, like: Tensor) -> Tensor:
        """A setting that is a list of numbers, as a tensor."""
        return torch.tensor([float(each) for each in self.settings[name]], dtype=like.dtype, device=like.device)


class RegressionDecision(TaskDecision):
    """Intervals around the members' mean, wider where the members spread, and a width above which nothing is answered.

    settings, beside those of every task
        floors: of each output, what is added to the spread
        factors: of each output, half of its interval's width is so many times the spread with the floor
    `detector_score` is the width of the interval, of several outputs the mean of their widths.
    """

    fields = ("floors", "factors")
    score_bounds = (0.0, math.inf)

    @classmethod
    def check(cls, settings: Any, num_parameters: float) -> None:
        super().check(settings, num_parameters)
        for name in cls.fields:
            found = settings[name]
            suits = isinstance(found, list) and len(found) > 0 and all(map(is_positive, found))
            check_field(name, found, suits, "a list of positive numbers, one for each output")
        same = len(settings["floors"]) == len(settings["factors"])
        check_field("factors", settings["factors"], same, "as many numbers as floors")

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> Decided:
        """member_logits: (batch, members, outputs); the interval is (batch, outputs, 2)"""
        member_logits = at_least_float32(member_logits)
        mean, half = member_logits.mean(dim=1), self.numbers("factors", member_logits)
        half = half * (spread(member_logits) + self.numbers("floors", member_logits))
        width = (2 * half).mean(dim=-1)
        interval = torch.stack([mean - half, mean + half], dim=-1)
        return Decided(member_logits, width, self.above_threshold(width), interval=interval)


def spread(member_logits: Tensor) -> Tensor:
    """The standard deviation between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    deviations = member_logits - member_logits.mean(dim=1, keepdim=True)
    return deviations.square().mean(dim=1).sqrt()


# By the task in the settings; settings without one are of a model that chooses one class.
DECISIONS: dict[str | None, type[Decision]] = {None: Decision, "regression": RegressionDecision}


def decision_of(settings: Any, num_parameters: int) -> Decision:
    """The decision that these settings describe."""
    task = settings.get("task") if isinstance(settings, Mapping) else None
    if task not in DECISIONS:
        raise ValueError(
            f"decision.task is {str(task)[:100]!r}: this version knows {', '.join(filter(None, DECISIONS))}; install a newer "
            "one, or calibrate the model again"
        )
    return DECISIONS[task](settings, num_parameters)
