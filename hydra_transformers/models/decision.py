"""What a calibrated model makes of its answer: how sure it is, whether to act on it, and which classes it may be."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .compat import is_exporting
from .detection import DETECTORS, score
from .ensembling import at_least_float32, log_mean_probability


logger = logging.get_logger(f"transformers.{__name__}")

ROUNDING = 1e-6  # of sums of probabilities; in doubt a class is in the set
VALUES_PER_WEIGHT = 4  # by which weights are known again

Places = tuple[list[dict[str, nn.Parameter | None]], list[str]]  # modules' own parameters, and the name of one in each


@dataclass(frozen=True)
class Decided:
    """
    member_logits: (batch, members, classes), divided by the temperature
    detector_score: (batch,), higher is less sure; None without a detector
    abstain: (batch,) bool, whether the score is above the threshold, or no number; None without a threshold
    prediction_set: (batch, classes) bool, the classes that it may be; None without sets
    """

    member_logits: Tensor
    detector_score: Tensor | None = None
    abstain: Tensor | None = None
    prediction_set: Tensor | None = None


class Decision(nn.Module):
    """A temperature, a detector with its threshold, and prediction sets, as `calibrate` fitted them.

    settings: the config's `decision`
        temperature: a number
        detector: None, or {"name", "by", "multi_label", "settings"}, see `detection.score`
        threshold: None, or the highest score that is answered
        sets: None, or {"method": "lac" | "aps" | "raps", "thresholds", "by_class", "k_reg", "penalty", "allow_empty"}
        alpha: the share of the sets that may miss the right class
        state: {name: shape} of the detector's tensors, and weights: how many numbers the weights are known by
        sentences: what was fitted on what, and what it promises
    """

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__()
        self.settings = dict(settings)
        for name, shape in {**settings["state"], "weights": [settings["weights"]]}.items():
            self.register_buffer(name, torch.full(shape, math.nan))
        self.is_on = True
        # The weights and where they belong, their version, whether they are as calibrated.
        self.seen: tuple[list[nn.Parameter], Places, int, bool] | None = None

    @property
    def reads_features(self) -> bool:
        detector = self.settings["detector"]
        return detector is not None and "features" in DETECTORS[detector["name"]].reads

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> Decided:
        """member_logits: (batch, members, classes); member_features: (batch, members, dim), where `reads_features`"""
        member_logits = at_least_float32(member_logits) / self.settings["temperature"]
        detector, threshold, sets = (self.settings[name] for name in ("detector", "threshold", "sets"))
        detector_score = None
        if detector is not None:
            state = {name: getattr(self, name) for name in self.settings["state"]}
            by, multi_label = detector["by"], detector["multi_label"]
            options = detector["settings"]
            detector_score = score(detector["name"], member_logits, member_features, state, by, multi_label, **options)
        return Decided(
            member_logits,
            detector_score,
            None if threshold is None else ~(detector_score <= float(threshold)),
            None if sets is None else prediction_sets(log_mean_probability(member_logits).exp(), **sets),
        )

    # Whether it is about the weights that the model has now

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model's weights are those that were calibrated. Looks at them where something was written into one, or
        another was put into its place, as quantisers do."""
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return True
        if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
            return self._told(False)
        if self.seen is not None and not all(map(is_, map(dict.get, *self.seen[1]), self.seen[0])):
            self.seen = None
        weights = list(model.parameters()) if self.seen is None else self.seen[0]
        if any(weight.is_meta for weight in weights):
            if hasattr(model, "hf_device_map"):
                logger.warning_once(
                    "weights of this model are offloaded, so that nobody can tell whether it was calibrated with them: its "
                    "temperature, its threshold and its sets are left out, load it without offloading"
                )
            return False  # otherwise there is no model, only its shapes
        version = _version(weights)
        if self.seen is None or self.seen[2] != version:
            self.seen = (weights, _places_of(model), version, _sample_is(self.weights, weights))
        return self._told(self.seen[3])

    def _told(self, is_current: bool) -> bool:
        if not is_current:
            logger.warning_once(
                "the weights have changed since this model was calibrated: its temperature, its threshold and its sets are "
                "left out, call calibrate() again"
            )
        return is_current

    def remember(self, model: nn.Module) -> None:
        """Takes the model's weights for those that were calibrated."""
        self.weights = sample_of(list(model.parameters())).to(self.weights.device)
        self.seen = None

    def check_loaded(self) -> None:
        missing = next((name for name, tensor in self.named_buffers() if tensor.isnan().any()), None)
        if missing is not None:
            raise ValueError(
                f"the config has a decision, but the weights have no decision.{missing}: take `decision` out of config.json, "
                "or save the calibrated model again"
            )


@contextmanager
def undecided(model: nn.Module) -> Iterator[None]:
    """A calibrated model answers as if it were not: no temperature, nothing decided."""
    before = model.decision.is_on if model.decision is not None else None
    try:
        if before is not None:
            model.decision.is_on = False
        yield
    finally:
        if before is not None:
            model.decision.is_on = before


def prediction_sets(
    probabilities: Tensor,
    method: str,
    thresholds: list[float],
    by_class: bool = False,
    k_reg: int | None = None,
    penalty: float | None = None,
    allow_empty: bool = False,
) -> Tensor:
    """The classes that suit each row, bool (batch, classes), of the ensemble's probabilities (batch, classes)."""
    if method == "lac":
        unsuited = 1 - probabilities
    else:
        # ONNX has one sort, and it is stable.
        is_stable = {} if is_exporting() else {"stable": True}
        ordered, order = probabilities.sort(dim=-1, descending=True, **is_stable)
        unsuited = ordered.cumsum(dim=-1)
        if method == "raps":
            ranks = torch.arange(1, probabilities.shape[-1] + 1, device=probabilities.device)
            unsuited = unsuited + penalty * (ranks - k_reg).clamp(min=0)
        unsuited = torch.zeros_like(unsuited).scatter(-1, order, unsuited)
    highest = torch.tensor([float(each) for each in thresholds], dtype=unsuited.dtype, device=unsuited.device)
    chosen = unsuited <= highest + ROUNDING
    if allow_empty:
        return chosen
    likeliest = nn.functional.one_hot(probabilities.argmax(dim=-1), probabilities.shape[-1]).bool()
    return chosen | (likeliest & ~chosen.any(dim=-1, keepdim=True))


def sample_of(weights: list[nn.Parameter]) -> Tensor:
    """A few numbers of every weight, in float32 on the CPU; of a quantised one its codes and scales."""
    parts = []
    for weight in _plain(weights):
        values = weight.detach().reshape(-1)
        step = max(1, values.numel() // VALUES_PER_WEIGHT)
        parts.append(values[::step][:VALUES_PER_WEIGHT].float().cpu())
    return torch.cat(parts)


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that hold numbers: those inside of tensors of other classes (torchao's, distributed ones), which cannot be
    cut nor viewed."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor


def _sample_is(remembered: Tensor, weights: list[nn.Parameter]) -> bool:
    """Whether weights are those remembered, as far as their dtype tells."""
    found = sample_of(weights)
    if found.shape != remembered.shape:
        return False
    dtypes = [weight.dtype for weight in _plain(weights) for _ in range(min(VALUES_PER_WEIGHT, weight.numel()))]
    expected = remembered.detach().float().cpu()
    for dtype in set(dtypes):
        of_dtype = torch.tensor([each == dtype for each in dtypes])
        own = expected[of_dtype]
        # Rounded to codes, small weights would all be 0.
        if not torch.equal(own.to(dtype).float() if dtype.is_floating_point else own, found[of_dtype]):
            return False
    return True


def _places_of(model: nn.Module) -> Places:
    """Where `model.parameters()` lie, in their order."""
    places = {}
    for module in model.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                places.setdefault(weight, (module._parameters, name))
    owners, names = zip(*places.values(), strict=True)
    return list(owners), list(names)


def _version(weights: list[nn.Parameter]) -> int:
    """Grows whenever something is written into one of the weights."""
    try:
        return sum(weight._version for weight in weights)
    except RuntimeError:  # made in inference mode, where nobody writes
        return 0
