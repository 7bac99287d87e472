"""What a calibrated model makes of its answer: how sure it is, whether to act on it, and which classes it may be."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .compat import is_exporting
from .detection import DETECTORS, score
from .ensembling import at_least_float32, log_mean_probability
from .fixed_dtype import FixedDtype
from .known_weights import SeenWeights, are_same, dtype_of, sample_of, weights_of_replica


logger = logging.get_logger(f"transformers.{__name__}")

ROUNDING = 1e-6  # of sums of probabilities; in doubt a class is in the set


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


class Decision(FixedDtype):
    """A temperature, a detector with its threshold, and prediction sets, as `calibrate` fitted them.

    settings: the config's `decision`
        temperature: a number
        detector: None, or {"name", "by", "multi_label", "settings"}, see `detection.score`
        threshold: None, or the highest score that is answered
        sets: None, or {"method": "lac" | "aps" | "raps", "thresholds", "by_class", "k_reg", "penalty", "allow_empty"}
        alpha: the share of the sets that may miss the right class
        dtype: of the weights that were calibrated; configs of before have none
        state: {name: shape} of the detector's tensors, and weights: how many numbers the weights are known by
        sentences: what was fitted on what, and what it promises
    """

    def __init__(self, settings: Mapping[str, Any]):
        super().__init__()
        self.settings = dict(settings)
        for name, shape in {**settings["state"], "weights": [settings["weights"]]}.items():
            self.register_buffer(name, torch.full(shape, math.nan))
        self.is_on = True
        self.seen: SeenWeights | None = None

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
        """Whether the model's weights are those that were calibrated. A few of their values are looked at each time: who writes
        into `weight.data`, as PEFT does when it merges adapters, leaves no other trace."""
        if is_exporting():
            return True  # who exports has asked before
        if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
            return self._told(False)
        if self.seen is not None and self.seen.is_unchanged():
            return self._told(self.seen.are_calibrated)
        self.seen = None
        weights = list(model.parameters())
        if not weights:  # a replica of DataParallel, whose weights are plain tensors
            return self._told(are_same(self.weights, weights_of_replica(model)))
        if any(weight.is_meta for weight in weights):
            if hasattr(model, "hf_device_map"):
                logger.warning_once(
                    "weights of this model are offloaded, so that nobody can tell whether it was calibrated with them: its "
                    "temperature, its threshold and its sets are left out, load it without offloading"
                )
            return False  # otherwise there is no model, only its shapes
        are_calibrated = are_same(self.weights, weights)
        self.seen = SeenWeights.of(model, weights, are_calibrated)
        self._tell_of_dtype(weights)
        return self._told(are_calibrated)

    def _told(self, is_current: bool) -> bool:
        if not is_current:
            logger.warning_once(
                "the weights have changed since this model was calibrated: its temperature, its threshold and its sets are "
                "left out, call calibrate() again"
            )
        return is_current

    def _tell_of_dtype(self, weights: list[nn.Parameter]) -> None:
        then, now = self.settings.get("dtype"), dtype_of(weights)
        if None in (then, now) or not self.reads_features:
            return
        if torch.finfo(getattr(torch, now)).eps > torch.finfo(getattr(torch, then)).eps:
            logger.warning_once(
                f"this model was calibrated in {then} and runs in {now}: its detector, {self.settings['detector']['name']}, reads "
                "features, and may take what rounding changes in them for foreign; call calibrate() in this dtype"
            )

    def remember(self, model: nn.Module) -> None:
        """Takes the model's weights for those that were calibrated."""
        self.settings["dtype"] = dtype_of(list(model.parameters()))
        self.weights = sample_of(list(model.parameters())).to(self.weights.device)
        self.seen = None

    def _apply(self, fn, recurse=True):
        self.seen = None  # it holds on to the weights' memory
        return super()._apply(fn, recurse)

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
