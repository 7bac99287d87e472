"""Temperature scaling: soften or sharpen the ensemble's probabilities so that confidence matches
accuracy."""

import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..data.prediction import accepted_inputs, answer_of, device_of, member_logits_of
from ..models.ensembling import log_mean, pool_then_scale
from ..models.modeling_hydra import HydraClassifierOutput
from .inputs import as_labels, as_member_logits, as_multi_hot, as_tensor, wide_log_softmax, widened


LOG_RANGE = (math.log(1e-2), math.log(1e2))  # of the search
ROWS_PER_PASS = 4096  # bounds the memory of a float64 pass over the validation logits


class TemperatureScaling:
    """Gives the ensemble's prediction a temperature: 1 changes nothing, above 1 softens.

    With p the members' mean probability, the prediction is softmax(log p / T), and members change
    together so that their mean is that prediction. For a single model, logits are divided by T.

    Args:
        temperature (`float`, defaults to 1.0): T.

    Example:
        >>> TemperatureScaling(2.0)(torch.tensor([[[4.0, 0.0]]]))
        tensor([[[2., 0.]]])
    """

    def __init__(self, temperature: float = 1.0):
        if not 0 < temperature < math.inf:
            raise ValueError(f"temperature is {temperature}: pass a positive number")
        self.temperature = float(temperature)

    @classmethod
    def fit(cls, member_logits: Any, labels: Any) -> "TemperatureScaling":
        """Fit the temperature with the smallest negative log-likelihood of the labels, see
        `best_temperature`."""
        return cls(best_temperature(member_logits, labels))

    def __call__(self, member_logits: Tensor) -> Tensor:
        """Scale member logits, (batch, members, classes); at least in float32."""
        dtype = torch.promote_types(member_logits.dtype, torch.float32)
        return pool_then_scale(member_logits.to(dtype), self.temperature)

    def wrap(self, model: nn.Module) -> "TemperatureScaledClassifier":
        """Return the model with this temperature built in, usable wherever the model is."""
        return TemperatureScaledClassifier(model, self)


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
        member_logits = member_logits_of(output, type(self.model).__name__)
        return answer_of(self.model, self.scaling(member_logits))


def fit_temperature(member_logits: Tensor, labels: Tensor, pooled: bool = True) -> float:
    """Return `best_temperature`; 1 if all predictions are right. The best is then the lowest, at
    which all scores are equal."""
    value = _search(member_logits, labels, pooled)
    if not _is_at_edge(value):
        return value
    if value > 1:
        _warn_of_edge(value)
        return value
    warnings.warn(
        "the validation logits are all right, so that no temperature is better than those below it: it stays 1",
        stacklevel=3,
    )
    return 1.0


def best_temperature(member_logits: Any, labels: Any, pooled: bool = True) -> float:
    """Return the temperature with the smallest negative log-likelihood of the labels,
    `-log softmax(log p / T)`.

    The search is deterministic and in float64: a grid over log T from 0.01 to 100, then a golden
    section.

    member_logits: (samples, members, classes)
    labels: (samples,), or of a multi-label model (samples, labels), 0 or 1
    pooled: of the members' mean probability, or (and of multi-label models) of each member's logits
        before the mean
    """
    value = _search(member_logits, labels, pooled)
    if _is_at_edge(value):
        _warn_of_edge(value)
    return value


def _is_at_edge(temperature: float) -> bool:
    return any(math.isclose(temperature, math.exp(edge)) for edge in LOG_RANGE)


def _warn_of_edge(temperature: float) -> None:
    warnings.warn(
        f"the best temperature lies at the edge of the search range ({temperature:.4g}): "
        "the validation logits are all right, or tell nothing about the labels",
        stacklevel=4,
    )


def _search(member_logits: Any, labels: Any, pooled: bool) -> float:
    # Of a multi-label model, each label of each row is a row with the classes no and yes.
    if as_tensor(labels).dim() == 2:
        pooled = False
        member_logits = as_member_logits(member_logits, least_classes=1)
        labels = as_multi_hot(labels, len(member_logits), member_logits.shape[-1]).long().flatten()
        yes = member_logits.transpose(1, 2).flatten(0, 1)
        member_logits = torch.stack([torch.zeros_like(yes), yes], dim=-1)
    member_logits = as_member_logits(member_logits).detach()
    labels = as_labels(labels, len(member_logits), member_logits.shape[-1]).to(member_logits.device)
    if pooled:
        parts = [log_mean(wide_log_softmax(part)) for part in member_logits.split(ROWS_PER_PASS)]
        member_logits = torch.cat(parts).unsqueeze(1)

    # The ensemble's likelihood may have several minima: search a grid first, then refine the best.
    grid = torch.linspace(*LOG_RANGE, 33, dtype=torch.float64, device="cpu").tolist()
    values = [_mean_nll(member_logits, labels, point) for point in grid]
    best = values.index(min(values))
    if values[best] == math.inf:
        raise ValueError("member_logits gives some label the probability 0 (logit -inf): leave such samples out")
    if best in (0, len(grid) - 1):
        return math.exp(grid[best])
    nll = partial(_mean_nll, member_logits, labels)
    return math.exp(_golden_section(nll, grid[best - 1], grid[best + 1]))


def _golden_section(function: Callable[[float], float], low: float, high: float, width: float = 1e-6) -> float:
    """Return the minimum of a function with one valley between low and high."""
    ratio = (math.sqrt(5) - 1) / 2
    left = high - ratio * (high - low)
    right = low + ratio * (high - low)
    at_left = function(left)
    at_right = function(right)
    while high - low > width:
        if at_left <= at_right:
            high = right
            right = left
            at_right = at_left
            left = high - ratio * (high - low)
            at_left = function(left)
        else:
            low = left
            left = right
            at_left = at_right
            right = low + ratio * (high - low)
            at_right = function(right)
    return (low + high) / 2


def _mean_nll(member_logits: Tensor, labels: Tensor, log_temperature: float) -> float:
    """Return the mean negative log-likelihood of the labels of logits that are divided by a
    temperature."""
    total = 0.0
    for logits, targets in zip(member_logits.split(ROWS_PER_PASS), labels.split(ROWS_PER_PASS), strict=True):
        scaled = widened(logits) / math.exp(log_temperature)
        log_means = log_mean(wide_log_softmax(scaled))
        targets = targets.to(log_means.device).unsqueeze(1)
        total -= float(log_means.gather(1, targets).sum())
    return total / len(labels)
