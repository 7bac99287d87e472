"""The decision of a calibrated model: how it is applied, and whether the weights are still those that were calibrated."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .decision_settings import ROUNDING, check_settings
from .detection import DETECTORS, answers_of, score
from .modeling_hydra import (
    FixedDtype,
    at_least_float32,
    is_exporting,
    log_mean_of_exponentials,
    log_mean_probability,
)


logger = logging.get_logger(f"transformers.{__name__}")


@dataclass(frozen=True)
class Decided:
    """
    member_logits: (batch, members, classes), with the temperature
    detector_score: (batch,), higher is less sure
    abstain: (batch,) bool, whether the score is above the threshold, or the answer is not a number
    prediction_set: (batch, classes) bool, the possible classes, all where the answer is not a number; None without sets
    interval: (batch, outputs, 2), of regression: the lowest and the highest number that each output may be; else None
    """

    member_logits: Tensor
    detector_score: Tensor
    abstain: Tensor
    prediction_set: Tensor | None = None
    interval: Tensor | None = None

    def outputs(self) -> dict[str, Tensor | None]:
        """What a model's output takes over beside the logits."""
        return {name: getattr(self, name) for name in ("detector_score", "abstain", "prediction_set", "interval")}


class Decision(FixedDtype):
    """A temperature, a detector with its threshold, and prediction sets, as `calibrate` fitted them.

    settings: the config's `decision`
        temperature: a positive number
        pooled: whether the temperature is the ensemble's, see `pool_then_scale`; absent, it divides each member's logits
        detector: {"name", "by", "settings"}, see `detection.score`
        threshold: None, or the highest score that is answered
        sets: None, or {"method": "lac" | "aps" | "raps", "thresholds", "by_class", "k_reg", "penalty", "allow_empty"}
        alpha: the share of the sets that may miss the right class
        dtype: of the weights that were calibrated
        state: {name: shape} of the detector's tensors
        digests: {"weights": of the model's weights, in the dtype they had and in coarser ones, "state": of the tensors}
        sentences: what was fitted on what, and what it promises
        classes, prompts: of a zero-shot classifier, the names of its classes and a digest of the prompts
    num_parameters: of the model, which bounds how large `state` may be
    """

    def __init__(self, settings: Mapping[str, Any], num_parameters: int):
        super().__init__()
        self.check(settings, num_parameters)
        self.settings = dict(settings)
        for name, shape in settings["state"].items():
            self.register_buffer(name, torch.full(shape, math.nan, dtype=torch.float32))
        self.is_on = True
        self.seen: SeenWeights | None = None

    @classmethod
    def check(cls, settings: Any, num_parameters: float) -> None:
        """Refuses settings that `calibrate` cannot have written."""
        check_settings(settings, num_parameters)

    @property
    def reads_features(self) -> bool:
        return "features" in DETECTORS[self.settings["detector"]["name"]].reads

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> Decided:
        """member_logits: (batch, members, classes); member_features: (batch, members, dim), where `reads_features`"""
        scale = pool_then_scale if self.settings.get("pooled") else torch.div
        member_logits = scale(at_least_float32(member_logits), self.settings["temperature"])
        detector, threshold, sets = (self.settings[name] for name in ("detector", "threshold", "sets"))
        state = {name: getattr(self, name) for name in self.settings["state"]}
        name, by = detector["name"], detector["by"]
        detector_score = score(name, answers_of(member_logits, member_features, state), by, **detector["settings"])
        log_probabilities = log_mean_probability(member_logits)
        is_no_number = log_probabilities.isnan().any(dim=-1)
        abstain, chosen = is_no_number, None
        if threshold is not None:
            abstain = abstain | ~(detector_score <= float(threshold))
        if sets is not None:
            chosen = prediction_sets(log_probabilities.exp(), **sets) | is_no_number.unsqueeze(-1)
        return Decided(member_logits, detector_score, abstain, chosen)

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model's weights are those that were calibrated.

        All numbers are compared at the first call, and again after training, a cast, a copy or a move, or where an operation
        wrote to a weight, or a weight or module was replaced. Writing into `weight.data` leaves no trace, and is noticed only
        then.
        """
        if is_exporting():
            return True  # `export` has compared them
        if self.seen is None or not self.seen.is_untouched() or _has_adapters(model):
            return self.compare(model)
        return self._warn_unless(self.seen.are_calibrated)

    def compare(self, model: nn.Module) -> bool:
        """`is_current` by all numbers of the weights, whatever was seen before."""
        self.seen = None
        if _has_adapters(model):
            return self._warn_unless(False)
        weights = list(model.parameters())
        is_replica = not weights  # of DataParallel: its weights are plain tensors
        weights = weights or weights_of_replica(model)
        if any(weight.is_meta for weight in weights):
            if hasattr(model, "hf_device_map"):
                logger.warning_once(
                    "weights of this model are offloaded, so that nobody can tell whether it was calibrated with them: its "
                    "temperature, its threshold and its sets are left out, load it without offloading"
                )
            return False  # otherwise there is no model, only its shapes
        are_calibrated = digest_of(weights) in (self.settings["digests"] or {"weights": []})["weights"]
        if not is_replica:
            self.seen = SeenWeights(model, weights, are_calibrated)
        then, now = self.settings["dtype"], dtype_of(weights)
        if None not in (then, now) and self.reads_features and _eps(now) > _eps(then):
            logger.warning_once(
                f"this model was calibrated in {then} and runs in {now}: its detector, {self.settings['detector']['name']}, reads "
                "features, and may take what rounding changes in them for foreign; call calibrate() in this dtype"
            )
        return self._warn_unless(are_calibrated)

    def _warn_unless(self, is_current: bool) -> bool:
        if not is_current:
            logger.warning_once(
                "the weights have changed since this model was calibrated: its temperature, its threshold and its sets are "
                "left out, call calibrate() again"
            )
        return is_current

    def train(self, mode: bool = True) -> nn.Module:
        if mode or self.training:
            self.seen = None
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.seen = None  # it holds on to the weights' memory
        return super()._apply(fn, recurse)

    def check_loaded(self) -> None:
        expected = (self.settings["digests"] or {}).get("state")
        if not any(buffer.is_meta for buffer in self.buffers()) and self.state_digest() != expected:
            raise ValueError(
                "decision.state is not what was saved with these settings: the file of one calibration lies beside that of "
                "another, or of none; save the calibrated model again, or take `decision` out of config.json"
            )

    def state_digest(self) -> str:
        return digest_of(self.get_buffer(name) for name in sorted(self.settings["state"]))  # JSON sorts names, too


@contextmanager
def uncalibrated(model: nn.Module) -> Iterator[None]:
    """A calibrated model answers as if it were not: no temperature, nothing decided."""
    decision = model.decision
    before = decision is not None and decision.is_on
    try:
        if before:
            decision.is_on = False
        yield
    finally:
        if before:
            decision.is_on = True


def pool_then_scale(member_logits: Tensor, temperature: float) -> Tensor:
    """Member logits whose mean probability is the ensemble's answer with a temperature: (batch, members, classes).

    With p the members' mean probability, the answer is q = softmax(log p / T). Each member is first divided by T alone; then
    its probability of a class is multiplied by what is missing from the mean of all to q, the same factor for all members.
    A member whose probabilities now sum to more than 1 is reduced to 1, and what it loses goes, class by class, to those
    below 1: every member sums to 1 again, and the mean stays q. Each member keeps its log Σ exp z / T.
    """
    scaled = member_logits / temperature
    if member_logits.shape[1] == 1 or temperature == 1:
        return scaled
    smallest = torch.finfo(scaled.dtype).tiny  # keeps logarithms, and their gradients, finite
    sums = scaled.logsumexp(dim=-1, keepdim=True)
    log_members = scaled - sums
    log_mean = log_mean_of_exponentials(log_members)
    factor = (log_mean_probability(member_logits) / temperature).log_softmax(dim=-1) - log_mean
    factor = factor.masked_fill(log_mean == -math.inf, 0.0)  # a class that no member allows
    log_members = log_members + factor.unsqueeze(1)
    log_total = log_members.logsumexp(dim=-1, keepdim=True)  # near 0
    surplus = -torch.expm1(-log_total.clamp(min=0))  # as a share of what the member has
    lack = -torch.expm1(log_total.clamp(max=0))
    lost = (log_members + surplus.clamp(min=smallest).log()).logsumexp(dim=1, keepdim=True)
    shares = lack / lack.sum(dim=1, keepdim=True).clamp(min=smallest)
    received = lost + shares.clamp(min=smallest).log()
    return torch.stack([log_members - log_total.clamp(min=0), received]).logsumexp(dim=0) + sums


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


# The weights: are they those that were calibrated?

NUMBERS_PER_PASS = 2**20  # bounds the memory of a checksum


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> str:
    """A digest of every bit of the tensors, the same on every device.

    dtype: as if they were cast to it; those that are no finer stay as they are
    """
    digest, checksums = hashlib.sha256(), []
    for tensor in _plain(tensors):
        is_finer = dtype is not None and tensor.is_floating_point() and _eps(tensor.dtype) < _eps(dtype)
        own = dtype if is_finer else tensor.dtype
        digest.update(f"{tuple(tensor.shape)} {own} ".encode())
        checksums.append(_checksum(tensor.reshape(-1), own))
    for checksum in checksums:  # all are under way before the first is waited for
        digest.update(f"{checksum.tolist()} ".encode())
    return digest.hexdigest()


def _eps(dtype: str | torch.dtype) -> float:
    return torch.finfo(getattr(torch, dtype) if isinstance(dtype, str) else dtype).eps


def _checksum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Of each pass over the numbers two sums of their bits: plain, and times odd numbers that tell places apart."""
    totals = [torch.zeros((), dtype=torch.int64, device=values.device)]
    odd = 2 * torch.arange(min(2 * values.numel(), NUMBERS_PER_PASS), dtype=torch.int32, device=values.device) + 1
    for part in values.split(NUMBERS_PER_PASS):
        part = part.to(dtype)
        part = part.byte() if dtype == torch.bool else torch.view_as_real(part).flatten() if dtype.is_complex else part
        bits = part.view({1: torch.uint8, 2: torch.int16}.get(part.element_size(), torch.int32)).int()
        for numbers in bits.split(NUMBERS_PER_PASS):  # 64 bits are two numbers
            totals += [numbers.sum(), (numbers * odd[: len(numbers)]).sum()]
    return torch.stack(totals)


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """The tensors that hold numbers, be it inside of others (torchao's, distributed ones)."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            yield from _plain(getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        else:
            yield tensor.detach()


def _has_adapters(model: nn.Module) -> bool:
    return getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config")


def dtype_of(weights: list[Tensor]) -> str | None:
    """The dtype of most floating-point weights: "float32"."""
    names = [str(weight.dtype).removeprefix("torch.") for weight in weights if weight.is_floating_point()]
    return max(set(names), key=names.count, default=None)


def weights_of_replica(model: nn.Module) -> list[Tensor]:
    """In the order of `model.parameters()`."""
    found = (each for module in model.modules() for each in vars(module).get("_former_parameters", {}).values())
    return list({id(weight): weight for weight in found if weight is not None}.values())


class SeenWeights:
    """Weights that were compared, and what tells without reading them that none, nor a module, was replaced or changed."""

    def __init__(self, model: nn.Module, weights: list[nn.Parameter], are_calibrated: bool):
        self.weights, self.are_calibrated, self.stamp = weights, are_calibrated, _stamp(weights)
        places = {}  # the module's own dict of parameters and the name in it, of each weight
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    places.setdefault(weight, (module._parameters, name))
        self.owners, self.names = zip(*places.values(), strict=True)
        self.model = ref(model)  # which holds this: in a cycle, its memory would be freed late
        self.inside = [module._modules for module in model.modules() if module._modules and module is not model]
        self.modules = self.modules_in(model)

    def modules_in(self, model: nn.Module) -> list[list[nn.Module | None]]:
        top = [module for module in model._modules.values() if not isinstance(module, Decision)]
        return [top, *map(list, map(dict.values, self.inside))]

    def is_untouched(self) -> bool:
        in_place = all(map(is_, map(dict.get, self.owners, self.names), self.weights))
        model = self.model()
        in_place = in_place and model is not None and self.modules_in(model) == self.modules
        return in_place and _stamp(self.weights) == self.stamp

    def __reduce__(self) -> tuple:
        """A copied or pickled model has none: the versions of its weights start anew."""
        return type(None), ()


def _stamp(weights: list[nn.Parameter]) -> tuple[int, bool]:
    """Changes with every operation that writes into a weight, and where PEFT has frozen the weights for its adapters."""
    is_trained = weights[0].requires_grad
    try:
        return sum(map(attrgetter("_version"), weights)), is_trained
    except RuntimeError:  # made in inference mode, where nobody writes
        return 0, is_trained
