"""Regression and rewards: the ensemble's mean or `aggregate`. Ships with such models, and with encoders, which may get such
a head."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from .decision_settings import RECALIBRATE, DecisionSettings, positive_numbers, setting
from .ensembling import at_least_float32
from .task import DecisionOutput, Task


def variance(member_logits: Tensor) -> Tensor:
    """Return that between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    return (member_logits - member_logits.mean(dim=1, keepdim=True)).square().mean(dim=1)


def spread(member_logits: Tensor) -> Tensor:
    """Return the standard deviation between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    return variance(member_logits).sqrt()


def times_of_spread(aggregate: str) -> float | None:
    """Return how many times the spread is taken off the mean; None for "min"."""
    match = re.fullmatch(r"min|mean(?:-(\d+(?:\.\d+)?)std)?", aggregate) if isinstance(aggregate, str) else None
    if match is None:
        raise ValueError(f"aggregate is {aggregate!r}: use 'mean', 'min', or 'mean-2std' with any number for 2")
    return None if aggregate == "min" else float(match[1] or 0)


def aggregated(member_logits: Tensor, aggregate: str | None) -> Tensor:
    """Make one number of the members' numbers: (batch, members, outputs) -> (batch, outputs)

    aggregate: see `configuration_hydra`; None for the mean
    """
    member_logits = at_least_float32(member_logits)
    times = 0.0 if aggregate is None else times_of_spread(aggregate)
    if times is None:
        return member_logits.amin(dim=1)
    mean = member_logits.mean(dim=1)
    if times == 0:
        return mean
    # The root of 0 has no gradient: members that agree get none from here.
    return mean - times * variance(member_logits).clamp(min=torch.finfo(mean.dtype).tiny).sqrt()


def check_aggregate(config: PreTrainedConfig) -> None:
    """Raise for a config whose `aggregate` is unknown, or has no single score to be about."""
    times_of_spread(config.aggregate)
    if config.problem_type != "regression" or config.num_labels != 1:
        raise ValueError(
            f"aggregate is {config.aggregate!r}, which is for a single score, and the model has "
            f"{config.num_labels} outputs of problem_type {config.problem_type!r}: leave it out, or use num_labels=1 and "
            "problem_type='regression'"
        )


@dataclass(frozen=True, kw_only=True)
class RegressionSettings(DecisionSettings):
    """floors: of each output, what is added to the members' spread
    factors: of each output, half of its interval's width is so many times the spread with the floor
    """

    floors: tuple[float, ...] = setting(positive_numbers)
    factors: tuple[float, ...] = setting(positive_numbers)


class Regression(Task):
    """A number, or several."""

    name = "regression"
    title = "regression"
    predicts_numbers = True
    expected_labels = "a number per row and output"
    settings_class = "task_regression.RegressionSettings"

    def read_labels(
        self, labels: Any, classes: Sequence[str], words: Sequence[Sequence[str]] | None = None
    ) -> list[Any]:
        return labels.numbers(len(classes))

    def accepts(self, labels: Tensor, logits: Tensor) -> bool:
        return labels.numel() == logits.numel()

    def ensemble_logits(self, member_logits: Tensor, config: PreTrainedConfig | None = None) -> Tensor:
        return aggregated(member_logits, getattr(config, "aggregate", None))

    def scores(self, logits: Tensor) -> Tensor:
        return logits

    def prediction_fields(
        self, outputs: Mapping[str, Any], names: Any, top_k: int | None, settings: Any
    ) -> dict[str, Any]:
        """
        label, score: the first output's name and number; `scores` has all outputs, in their order
        uncertainty, epistemic: the variance between members, of several outputs the mean of theirs; aleatoric is None
        interval: [lowest, highest] of each output; None where it was not calibrated for that
        """
        members = outputs.get("member_logits")
        interval = outputs.get("interval")
        scores = [
            {"label": names[place], "score": number} for place, number in enumerate(outputs["logits"][0].tolist())
        ]
        # One row is (members, outputs); a plain model is one member.
        epistemic = 0.0 if members is None else members[0].double().var(dim=0, correction=0).mean().item()
        return {
            **scores[0],
            "uncertainty": epistemic,
            "aleatoric": None,
            "epistemic": epistemic,
            "prediction_set": None,
            "interval": None if interval is None else interval[0].tolist(),
            "scores": scores,
        }

    def decide(self, decision: Any, member_logits: Tensor, member_features: Tensor | None) -> DecisionOutput:
        """`detector_score` is the width of the interval (batch, outputs, 2), of several outputs the mean of their widths."""
        member_logits = at_least_float32(member_logits)
        mean = member_logits.mean(dim=1)
        half = decision.per_output("factors", member_logits)
        half = half * (spread(member_logits) + decision.per_output("floors", member_logits))
        width = (2 * half).mean(dim=-1)
        interval = torch.stack([mean - half, mean + half], dim=-1)
        return DecisionOutput(member_logits, width, decision.above_threshold(width), interval=interval)


@dataclass(frozen=True, kw_only=True)
class RewardSettings(DecisionSettings):
    """config: has the `aggregate`, by which members' scores become one"""

    @classmethod
    def read(cls, saved: Any, name: str = "decision") -> Any:
        settings = super().read(saved, name)
        if "aggregate" not in settings.config:
            raise ValueError(f"{name}.config is {str(settings.config)[:100]} and has no aggregate: {RECALIBRATE}")
        return settings

    def comparison(self, detector_score: float, threshold: float) -> str:
        return f"The score is {-detector_score:.3g}, below the threshold {-threshold:.3g}."


class Reward(Regression):
    """A single score, of a reward model or reranker, below which nothing is relevant."""

    name = "reward"
    title = "rewards and reranking"
    settings_class = "task_regression.RewardSettings"

    def decide(self, decision: Any, member_logits: Tensor, member_features: Tensor | None) -> DecisionOutput:
        """`detector_score` is the score with the opposite sign: scores below the threshold are not answered."""
        member_logits = at_least_float32(member_logits)
        aggregate = decision.settings.config["aggregate"]
        low = -aggregated(member_logits, aggregate).squeeze(-1)
        return DecisionOutput(member_logits, low, decision.above_threshold(low))
