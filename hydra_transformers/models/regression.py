"""The ensemble of a regression or reward model: its mean or `aggregate`.

Ships with regression models, and with encoders, which may get such a head.
"""

from typing import Any

import torch

from .configuration_hydra import times_of_spread


def variance(member_logits: torch.Tensor) -> torch.Tensor:
    """Between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    return (member_logits - member_logits.mean(dim=1, keepdim=True)).square().mean(dim=1)


def spread(member_logits: torch.Tensor) -> torch.Tensor:
    """The standard deviation between members, 0 for one: (batch, members, outputs) -> (batch, outputs)"""
    return variance(member_logits).sqrt()


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
    """The fields of a pipeline's prediction for one row, see `pipeline_hydra.PredictionsMixin`."""
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
