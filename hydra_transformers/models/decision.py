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

from .compat import is_exporting, is_recording_kernels
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
            return self._told(_sample_is(self.weights, _weights_of_replica(model)))
        if any(weight.is_meta for weight in weights):
            if hasattr(model, "hf_device_map"):
                logger.warning_once(
                    "weights of this model are offloaded, so that nobody can tell whether it was calibrated with them: its "
                    "temperature, its threshold and its sets are left out, load it without offloading"
                )
            return False  # otherwise there is no model, only its shapes
        are_calibrated = _sample_is(self.weights, weights)
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
        then, now = self.settings.get("dtype"), _dtype_of(weights)
        if None in (then, now) or not self.reads_features:
            return
        if torch.finfo(getattr(torch, now)).eps > torch.finfo(getattr(torch, then)).eps:
            logger.warning_once(
                f"this model was calibrated in {then} and runs in {now}: its detector, {self.settings['detector']['name']}, reads "
                "features, and may take what rounding changes in them for foreign; call calibrate() in this dtype"
            )

    def remember(self, model: nn.Module) -> None:
        """Takes the model's weights for those that were calibrated."""
        self.settings["dtype"] = _dtype_of(list(model.parameters()))
        self.weights = sample_of(list(model.parameters())).to(self.weights.device)
        self.seen = None

    def _apply(self, fn, recurse=True):
        """Goes where the model goes, but keeps its dtype: in 16 bits, distances and thresholds would be others."""
        self.seen = None  # it holds on to the weights' memory
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            found = getattr(self, name)
            if found.dtype != tensor.dtype:
                setattr(self, name, tensor.to(found.device))
        return self

    def check_loaded(self) -> None:
        missing = next((name for name, tensor in self.named_buffers() if tensor.isnan().any()), None)
        if missing is not None:
            raise ValueError(
                f"the config has a decision, but the weights have no decision.{missing}: take `decision` out of config.json, "
                "or save the calibrated model again"
            )


@dataclass(frozen=True)
class SeenWeights:
    """Weights as they were when they were looked at, so that looking again is quick.

    weights, places, version: the parameters, where they lie in their model, and a number that most writing into them raises
    tensors, addresses: those that hold numbers, and where these lie in memory
    views, values: some of the numbers, by dtype and device: where they lie, and what they were
    are_calibrated: whether they are those that were calibrated
    """

    weights: list[nn.Parameter]
    places: Places
    version: int
    tensors: list[Tensor]
    addresses: list[int]
    views: list[list[Tensor]]
    values: list[Tensor]
    are_calibrated: bool

    @classmethod
    def of(cls, model: nn.Module, weights: list[nn.Parameter], are_calibrated: bool) -> "SeenWeights | None":
        """None where a weight does not lie in one piece, so that what is cut from it may be a copy."""
        tensors = list(_plain(weights))
        if not all(tensor.is_contiguous() for tensor in tensors):
            return None
        groups: dict[tuple, list[Tensor]] = {}
        for tensor in tensors:
            middle = tensor.numel() // 2
            # Neighbours: what is spread takes longer to read.
            view = tensor.detach().view(-1)[middle : middle + VALUES_PER_WEIGHT]
            # Types of 8 bits and less have no comparison of their own.
            view = view.view(torch.uint8) if view.element_size() == 1 else view
            groups.setdefault((view.dtype, view.device), []).append(view)
        views = list(groups.values())
        values = [torch.cat(group) for group in views]
        addresses = [tensor.data_ptr() for tensor in tensors]
        return cls(weights, _places_of(model), _version(weights), tensors, addresses, views, values, are_calibrated)

    def is_unchanged(self) -> bool:
        """Whether they are where they were, and what they were."""
        if not all(map(is_, map(dict.get, *self.places), self.weights)):
            return False
        if _version(self.weights) != self.version:
            return False
        if [tensor.data_ptr() for tensor in self.tensors] != self.addresses:
            return False
        # A CUDA graph may not wait for numbers.
        return is_recording_kernels() or all(map(torch.equal, map(torch.cat, self.views), self.values))


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


def _dtype_of(weights: list[nn.Parameter]) -> str | None:
    """That of most weights that are floating-point numbers: "float32"."""
    names = [str(weight.dtype).removeprefix("torch.") for weight in weights if weight.is_floating_point()]
    return max(set(names), key=names.count, default=None)


def _weights_of_replica(model: nn.Module) -> list[Tensor]:
    """In the order of `model.parameters()`."""
    found = (each for module in model.modules() for each in vars(module).get("_former_parameters", {}).values())
    return list({id(weight): weight for weight in found if weight is not None}.values())


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
    """Grows whenever something is written into one of the weights, but for what is written into its `data`."""
    try:
        return sum(weight._version for weight in weights)
    except RuntimeError:  # made in inference mode, where nobody writes
        return 0
