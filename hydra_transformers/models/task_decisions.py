"""Decisions of tasks that do not choose one class: what a calibrated model adds to its answers, task by task."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .configuration_hydra import times_of_spread
from .decision import Decided, Decision
from .decision_settings import (
    ROUNDING,
    check_common,
    check_field,
    check_fields,
    check_threshold,
    is_positive,
    is_share,
)
from .detection import answers_of, is_number, score
from .modeling_hydra import aggregated, at_least_float32, logit_of_mean_probability, spread


logger = logging.get_logger(f"transformers.{__name__}")


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
        if "temperature" in cls.fields:
            temperature = settings["temperature"]
            check_field("temperature", temperature, is_positive(temperature), "a positive number")
        check_common(settings, (), num_parameters)

    @property
    def reads_features(self) -> bool:
        return False

    def is_current(self, model: nn.Module) -> bool:
        return self.has_its_aggregate(model) and super().is_current(model)

    def compare(self, model: nn.Module) -> bool:
        return self.has_its_aggregate(model) and super().compare(model)

    def has_its_aggregate(self, model: nn.Module) -> bool:
        """Whether the answers are put together as they were when this was fitted."""
        config = next(
            (each.config for each in model.modules() if hasattr(each, "config")), None
        )  # ensembles have none
        now, then = getattr(config, "aggregate", None), self.settings.get("aggregate")
        if now != then:
            logger.warning_once(
                f"config.aggregate was {then!r} when this model was calibrated and is {now!r}: its decision is left out, call "
                "calibrate() again"
            )
        return now == then

    def above_threshold(self, detector_score: Tensor) -> Tensor:
        """Which rows not to answer, bool; none without a threshold but those that are not numbers."""
        threshold = self.settings["threshold"]
        return detector_score.isnan() if threshold is None else ~(detector_score <= float(threshold))

    def numbers(self, name: str, like: Tensor) -> Tensor:
        """A setting that is a list of numbers, one for each output (the last axis of `like`), as a tensor."""
        if len(self.settings[name]) != like.shape[-1]:  # one number would silently serve them all
            raise ValueError(
                f"decision.{name} has {len(self.settings[name])} numbers, and the model has {like.shape[-1]} outputs: calibrate "
                "the model again, or take `decision` out of config.json"
            )
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


class RewardDecision(TaskDecision):
    """A score below which nothing is relevant, of a reward model or reranker.

    settings, beside those of every task
        aggregate: how the score came about when this was fitted
    `detector_score` is the score with the opposite sign, as scores below the threshold are not answered.
    """

    fields = ("aggregate",)

    @classmethod
    def check(cls, settings: Any, num_parameters: float) -> None:
        super().check(settings, num_parameters)
        times_of_spread(settings["aggregate"])

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> Decided:
        """member_logits: (batch, members, 1)"""
        member_logits = at_least_float32(member_logits)
        low = -aggregated(member_logits, self.settings["aggregate"]).squeeze(-1)
        return Decided(member_logits, low, self.above_threshold(low))


@dataclass(frozen=True)
class DecidedLabels(Decided):
    """answer: (batch, labels) bool, whether each label is answered with yes"""

    answer: Tensor | None = None


class LabelsDecision(TaskDecision):
    """A temperature, a threshold per label, the labels that a row may have, and when to abstain.

    settings, beside those of every task
        temperature: a positive number
        log_odds: of each label, from where on it is answered with yes
        set_log_odds: of each label, from where on it is in the set; None without sets
        per_label: whether the threshold is about each label by itself
    `detector_score` and `abstain` are (batch,), of the sum of the labels' entropies; with `per_label` (batch, labels), of minus
    the distance of each label's log-odds to its threshold.
    """

    fields = ("temperature", "log_odds", "set_log_odds", "per_label")

    @classmethod
    def check(cls, settings: Any, num_parameters: float) -> None:
        super().check(settings, num_parameters)
        per_label, sets = settings["per_label"], settings["set_log_odds"]
        check_field("per_label", per_label, isinstance(per_label, bool), "True or False")
        for name in ("log_odds", "set_log_odds"):
            found = settings[name]
            suits = isinstance(found, list) and len(found) > 0 and all(map(_is_log_odds, found))
            suits = suits or (found is None and name == "set_log_odds")
            check_field(name, found, suits, "a list of numbers, one for each label")
        same = sets is None or len(sets) == len(settings["log_odds"])
        check_field("set_log_odds", sets, same, "as many numbers as log_odds")

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> DecidedLabels:
        """member_logits: (batch, members, labels)"""
        member_logits = at_least_float32(member_logits) / self.settings["temperature"]
        log_odds = logit_of_mean_probability(member_logits)
        beyond = log_odds - self.numbers("log_odds", log_odds)
        if self.settings["per_label"]:
            detector_score = -beyond.abs()
        else:
            detector_score = score("entropy", answers_of(member_logits, multi_label=True), multi_label=True)
        chosen = None
        if self.settings["set_log_odds"] is not None:
            lowest = [_rounded_down(float(each)) for each in self.settings["set_log_odds"]]
            lowest = torch.tensor(lowest, dtype=log_odds.dtype, device=log_odds.device)
            chosen = (log_odds >= lowest) | log_odds.isnan()
        abstain = self.above_threshold(detector_score)
        return DecidedLabels(member_logits, detector_score, abstain, chosen, answer=beyond >= 0)


def _is_log_odds(value: Any) -> bool:
    return value in ("inf", "-inf") or is_number(value)  # JSON has no infinity: it is written as text


def _rounded_down(log_odds: float) -> float:
    """In doubt a label is in the set."""
    return log_odds - ROUNDING * (1 + abs(log_odds)) if math.isfinite(log_odds) else log_odds


# By the task in the settings; settings without one are of a model that chooses one class. `tokens` adds its own.
DECISIONS: dict[str | None, type[Decision]] = {
    None: Decision,
    "regression": RegressionDecision,
    "rewards": RewardDecision,
    "several labels": LabelsDecision,
}


def decision_of(settings: Any, num_parameters: int) -> Decision:
    """The decision that these settings describe."""
    task = settings.get("task") if isinstance(settings, Mapping) else None
    if not isinstance(task, str | None) or task not in DECISIONS:
        raise ValueError(
            f"decision.task is {str(task)[:100]!r}: this version knows {', '.join(filter(None, DECISIONS))}; install a newer "
            "one, or calibrate the model again"
        )
    return DECISIONS[task](settings, num_parameters)
