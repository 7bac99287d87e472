"""Temperature scaling: soften or sharpen the members' probabilities so that confidence matches accuracy."""

import json
import math
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .._io.files import parse_json, write_atomically
from ..data.prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..models.decision import pool_then_scale
from ..models.detection import log_mean
from ..models.modeling_hydra import HydraClassifierOutput
from .inputs import (
    as_labels,
    as_member_logits,
    as_multi_hot,
    as_tensor,
    as_two_classes,
    check_predictions,
    wide_log_softmax,
    widened,
)
from .saving import saved_in


FILE_NAME = "temperature.json"
LOG_RANGE = (math.log(1e-2), math.log(1e2))  # of the search
ROWS_PER_PASS = 4096  # bounds the memory of a float64 pass over the validation logits


class TemperatureScaling:
    """Gives the ensemble's answer a temperature, or each member's.

    Args:
        temperature: one number for the whole ensemble, or one per member; 1 changes nothing, above 1 softens.
        pooled: whether the one number is the ensemble's: with p the members' mean probability, the answer is
            softmax(log p / T), and members change together so that their mean is that answer (docs/uncertainty.md).
            Otherwise member logits are divided by it, before the softmax and the mean over members. For a single model
            both are the same.

    Example:
        >>> import torch
        >>> TemperatureScaling(2.0)(torch.tensor([[[4.0, 0.0]]]))
        tensor([[[2., 0.]]])
    """

    def __init__(self, temperature: float | Sequence[float] = 1.0, pooled: bool = False):
        values = torch.as_tensor(temperature, dtype=torch.float64, device="cpu").reshape(-1).tolist()
        if not values or not all(math.isfinite(value) and value > 0 for value in values):
            raise ValueError(f"temperature is {temperature}: pass one positive number, or one per member")
        if pooled and len(values) > 1:
            raise ValueError(
                f"temperature is {temperature}, and the pooled answer has one: pass one number, or pooled=False"
            )
        self.temperature, self.pooled = tuple(values), pooled

    def __repr__(self) -> str:
        values = ", ".join(f"{value:.4g}" for value in self.temperature)
        return f"TemperatureScaling({values}{', pooled=True' if self.pooled else ''})"

    @classmethod
    def fit(
        cls, member_logits: Any, labels: Any, per_member: bool = False, pooled: bool | None = None
    ) -> "TemperatureScaling":
        """Find the temperature with the smallest negative log-likelihood of the labels.

        Args:
            member_logits: validation logits, (samples, members, classes).
            labels: (samples,); of a model of several labels (samples, labels), 0 or 1, and each is a choice of yes or no.
            per_member: `True` finds one temperature per member, each minimising that member's own `-log softmax(z_m / T_m)`;
                `False` finds one for the ensemble.
            pooled: `True`, the default for one temperature of an ensemble that chooses one class, pools the members before
                the temperature: it minimises `-log softmax(log p / T)` with `p = 1/M Σ_m softmax(z_m)`. `False` divides the
                members' logits before they are pooled, and minimises `-log 1/M Σ_m softmax(z_m / T)`.

        The search is deterministic and in float64: a grid over log T from 0.01 to 100, then a golden section.
        """
        has_many_labels = as_tensor(labels).dim() == 2
        if pooled and (per_member or has_many_labels):
            what = "per_member finds one for each member" if per_member else "each label is a choice of its own"
            raise ValueError(
                f"pooled is True, one temperature for the ensemble's choice of a class, and {what}: leave it out"
            )
        pooled = pooled is not False and not per_member and not has_many_labels
        if has_many_labels:
            member_logits = as_member_logits(member_logits, least_classes=1)
            labels = as_multi_hot(labels, len(member_logits), member_logits.shape[-1]).long().flatten()
            member_logits = as_two_classes(member_logits)
        member_logits = as_member_logits(member_logits).detach()
        labels = as_labels(labels, len(member_logits), member_logits.shape[-1]).to(member_logits.device)
        if len(labels) == 0:
            raise ValueError("labels is empty: pass at least one validation sample")
        check_predictions(member_logits)
        if pooled:
            return cls(_best_temperature(_pooled(member_logits), labels), pooled=True)
        groups = member_logits.split(1, dim=1) if per_member else (member_logits,)
        return cls([_best_temperature(group, labels) for group in groups])

    def __call__(self, member_logits: Tensor) -> Tensor:
        """Scaled member logits, (batch, members, classes), at least in float32."""
        members = member_logits.shape[1]
        if len(self.temperature) not in (1, members):
            raise ValueError(
                f"there are {len(self.temperature)} temperatures, member_logits has {members} members: "
                "fit the temperatures on the same ensemble"
            )
        dtype = torch.promote_types(member_logits.dtype, torch.float32)
        if self.pooled:
            return pool_then_scale(member_logits.to(dtype), self.temperature[0])
        temperature = torch.tensor(self.temperature, dtype=dtype, device=member_logits.device)
        return member_logits.to(dtype) / temperature.reshape(1, -1, 1)

    def wrap(self, model: nn.Module) -> "TemperatureScaledClassifier":
        """The model with this temperature built in, usable wherever the model is."""
        return TemperatureScaledClassifier(model, self)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write `temperature.json` into a folder, such as the one the model was saved to."""
        content = {"temperature": self.temperature} | ({"pooled": True} if self.pooled else {})
        return write_atomically(Path(folder) / FILE_NAME, json.dumps(content) + "\n")

    @classmethod
    def load(cls, folder: str | os.PathLike) -> "TemperatureScaling":
        """Read `temperature.json` from a folder, or from a repository of the Hub."""
        path = saved_in(folder, FILE_NAME, "TemperatureScaling")
        try:
            content = parse_json(path.read_bytes())
            return cls(content["temperature"], content.get("pooled", False) is True)
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f'{path} is not a temperature file: expected {{"temperature": [1.5]}}') from error


def fit_temperature(logits: Tensor, labels: Tensor, pooled: bool | None = None) -> TemperatureScaling:
    """The best temperature for these rows, see `TemperatureScaling.fit`; 1 if all answers are right. The best is then the
    lowest, at which every answer is sure and all scores are equal."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaling = TemperatureScaling.fit(logits, labels, pooled=pooled)
    [value] = scaling.temperature
    if math.isclose(value, math.exp(LOG_RANGE[0])):
        warnings.warn(
            f"all answers to the {len(labels)} rows that a temperature was to be fitted on are right, which fits none: logits "
            "stay as they are, calibrate on more rows or harder ones",
            stacklevel=3,
        )
        return TemperatureScaling(1.0)
    for each in caught:
        warnings.warn(each.message, each.category, stacklevel=3)
    return scaling


class TemperatureScaledClassifier(nn.Module):
    """A classifier with a temperature; its output has `logits` and `member_logits`."""

    def __init__(self, model: nn.Module, scaling: TemperatureScaling):
        super().__init__()
        self.model = model
        self.scaling = scaling

    @property
    def device(self) -> torch.device:
        return device_of(self.model)

    @property
    def input_model(self) -> nn.Module:
        return self.model

    def forward(self, **inputs: Any) -> HydraClassifierOutput:
        output = self.model(**accepted_inputs(self.model, inputs))
        member_logits = self.scaling(member_logits_of(output, type(self.model).__name__))
        return answer_of(self.model, member_logits)


def _pooled(member_logits: Tensor) -> Tensor:
    """Log of the members' mean probability, as if of one member: (samples, 1, classes), in float64."""
    parts = [log_mean(wide_log_softmax(widened(part))) for part in member_logits.split(ROWS_PER_PASS)]
    return torch.cat(parts).unsqueeze(1)


def _best_temperature(member_logits: Tensor, labels: Tensor) -> float:
    low, high = LOG_RANGE
    # The ensemble's likelihood may have several minima: search a grid first, then refine the best.
    grid = torch.linspace(low, high, 33, dtype=torch.float64, device="cpu").tolist()
    values = [_mean_nll(member_logits, labels, point) for point in grid]
    best = values.index(min(values))
    if values[best] == math.inf:
        raise ValueError(
            "member_logits gives some label the probability 0 (logit -inf) at every temperature, so none is better than "
            "another: leave such samples out, or give the label a finite logit"
        )
    if best in (0, len(grid) - 1):
        warnings.warn(
            f"the best temperature lies at the edge of the search range ({math.exp(grid[best]):.4g}): "
            "the validation logits are all right, or tell nothing about the labels",
            stacklevel=4,
        )
        return math.exp(grid[best])
    return math.exp(
        _golden_section(lambda point: _mean_nll(member_logits, labels, point), grid[best - 1], grid[best + 1])
    )


def _golden_section(function: Callable[[float], float], low: float, high: float, width: float = 1e-6) -> float:
    """The minimum of a function with one valley between low and high."""
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = function(left), function(right)
    while high - low > width:
        if at_left <= at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _mean_nll(member_logits: Tensor, labels: Tensor, log_temperature: float) -> float:
    total = 0.0
    for logits, targets in zip(member_logits.split(ROWS_PER_PASS), labels.split(ROWS_PER_PASS), strict=True):
        log_means = log_mean(wide_log_softmax(widened(logits) / math.exp(log_temperature)))
        total -= float(log_means.gather(1, targets.to(log_means.device).unsqueeze(1)).sum())
    return total / len(labels)
