"""The ensemble of a regression or reward model: its mean or `aggregate`. Ships with such models, and with encoders,
which may get such a head."""

import re
from typing import Any

import torch
from transformers import PreTrainedConfig


def variance(member_logits: torch.Tensor) -> torch.Tensor:
    """Between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    return (member_logits - member_logits.mean(dim=1, keepdim=True)).square().mean(dim=1)


def spread(member_logits: torch.Tensor) -> torch.Tensor:
    """The standard deviation between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    return variance(member_logits).sqrt()


def times_of_spread(aggregate: str) -> float | None:
    """How many times the spread is taken off the mean; None for "min"."""
    match = re.fullmatch(r"min|mean(?:-(\d+(?:\.\d+)?)std)?", aggregate) if isinstance(aggregate, str) else None
    if match is None:
        raise ValueError(f"aggregate is {aggregate!r}: use 'mean', 'min', or 'mean-2std' with any number for 2")
    return None if aggregate == "min" else float(match[1] or 0)


def aggregated(member_logits: torch.Tensor, aggregate: str | None) -> torch.Tensor:
    """One number of the members' numbers: (batch, members, outputs) -> (batch, outputs)

    aggregate: see `configuration_hydra`; None for the mean
    """
    member_logits = member_logits.to(torch.promote_types(member_logits.dtype, torch.float32))
    times = 0.0 if aggregate is None else times_of_spread(aggregate)
    if times is None:
        return member_logits.amin(dim=1)
    mean = member_logits.mean(dim=1)
    if times == 0:
        return mean
    # The root of 0 has no gradient: members that agree get none from here.
    return mean - times * variance(member_logits).clamp(min=torch.finfo(mean.dtype).tiny).sqrt()


def prediction_fields(outputs: dict, names: Any) -> dict[str, Any]:
    """The fields of a pipeline's prediction for one row, beside what it decides.

    label, score: the first output's name and number; `scores` has all outputs, in their order
    uncertainty, epistemic: the variance between members, of several outputs the mean of theirs; aleatoric is None
    interval: [lowest, highest] of each output; None where it was not calibrated for that
    """
    numbers, members, interval = map(outputs.get, ("logits", "member_logits", "interval"))
    scores = [{"label": names[place], "score": number} for place, number in enumerate(numbers[0].tolist())]
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


class Problem:  # like `SingleLabel`, not a subclass: a decision may bring it to models with older code
    expected_labels = "a number per row and output"
    divides_by_items = False
    ensemble_logits = staticmethod(aggregated)
    prediction_fields = staticmethod(prediction_fields)

    @staticmethod
    def check_aggregate(config: PreTrainedConfig) -> None:
        times_of_spread(config.aggregate)
        if config.problem_type != "regression" or config.num_labels != 1:
            raise ValueError(
                f"aggregate is {config.aggregate!r}, which is for a single score, and the model has "
                f"{config.num_labels} outputs of problem_type {config.problem_type!r}: leave it out, or use num_labels=1 and "
                "problem_type='regression'"
            )

    @staticmethod
    def accepts(labels: torch.Tensor, batch: int, classes: int) -> bool:
        return labels.numel() == batch * classes
