"""A calibrated model's decision: its settings and their checks, how it is applied, and whether it is about these weights."""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import logging

from .detection import DETECTORS, check_detector, is_number, score
from .modeling_hydra import FixedDtype, at_least_float32, is_exporting, log_mean_probability


logger = logging.get_logger(f"transformers.{__name__}")

ROUNDING = 1e-6  # of scores and sums of probabilities; in doubt a class is in the set
SET_METHODS = ("lac", "aps", "raps")


@dataclass(frozen=True)
class Decided:
    """
    member_logits: (batch, members, classes), divided by the temperature
    detector_score: (batch,), higher is less sure
    abstain: (batch,) bool, whether the score is above the threshold; also where the answer is not a number, which is all
        that counts where no threshold was fitted
    prediction_set: (batch, classes) bool, the classes that it may be, all where the answer is not a number; None without sets
    """

    member_logits: Tensor
    detector_score: Tensor
    abstain: Tensor
    prediction_set: Tensor | None = None


class Decision(FixedDtype):
    """A temperature, a detector with its threshold, and prediction sets, as `calibrate` fitted them.

    settings: the config's `decision`, see `check_settings`
        temperature: a positive number
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
        check_settings(settings, num_parameters)
        self.settings = dict(settings)
        for name, shape in settings["state"].items():
            self.register_buffer(name, torch.full(shape, math.nan))
        self.is_on = True
        self.seen: SeenWeights | None = None

    @property
    def reads_features(self) -> bool:
        return "features" in DETECTORS[self.settings["detector"]["name"]].reads

    def forward(self, member_logits: Tensor, member_features: Tensor | None = None) -> Decided:
        """member_logits: (batch, members, classes); member_features: (batch, members, dim), where `reads_features`"""
        member_logits = at_least_float32(member_logits) / self.settings["temperature"]
        detector, threshold, sets = (self.settings[name] for name in ("detector", "threshold", "sets"))
        state = {name: getattr(self, name) for name in self.settings["state"]}
        name, by = detector["name"], detector["by"]
        detector_score = score(name, member_logits, member_features, state, by, **detector["settings"])
        log_probabilities = log_mean_probability(member_logits)
        is_no_number = log_probabilities.isnan().any(dim=-1)
        abstain, chosen = is_no_number, None
        if threshold is not None:
            abstain = abstain | ~(detector_score <= float(threshold))
        if sets is not None:
            chosen = prediction_sets(log_probabilities.exp(), **sets) | is_no_number.unsqueeze(-1)
        return Decided(member_logits, detector_score, abstain, chosen)

    # Whether it is about the weights that the model has now

    def is_current(self, model: nn.Module) -> bool:
        """Whether the model's weights are those that were calibrated.

        All of their numbers are compared when it is first asked, and again after training, a cast or a move, or where
        a weight was replaced or written to by an operation. Writing into `weight.data` leaves no trace, and shows only then.
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
        replicated = not weights  # by DataParallel: the weights are plain tensors
        weights = weights or weights_of_replica(model)
        if any(weight.is_meta for weight in weights):
            if hasattr(model, "hf_device_map"):
                logger.warning_once(
                    "weights of this model are offloaded, so that nobody can tell whether it was calibrated with them: its "
                    "temperature, its threshold and its sets are left out, load it without offloading"
                )
            return False  # otherwise there is no model, only its shapes
        are_calibrated = digest_of(weights) in (self.settings["digests"] or {"weights": []})["weights"]
        if not replicated:
            self.seen = SeenWeights.of(model, weights, are_calibrated)
        self._warn_of_dtype(weights)
        return self._warn_unless(are_calibrated)

    def _warn_unless(self, is_current: bool) -> bool:
        if not is_current:
            logger.warning_once(
                "the weights have changed since this model was calibrated: its temperature, its threshold and its sets are "
                "left out, call calibrate() again"
            )
        return is_current

    def _warn_of_dtype(self, weights: list[Tensor]) -> None:
        then, now = self.settings["dtype"], dtype_of(weights)
        if None in (then, now) or not self.reads_features:
            return
        if torch.finfo(getattr(torch, now)).eps > torch.finfo(getattr(torch, then)).eps:
            logger.warning_once(
                f"this model was calibrated in {then} and runs in {now}: its detector, {self.settings['detector']['name']}, reads "
                "features, and may take what rounding changes in them for foreign; call calibrate() in this dtype"
            )

    def remember(self, model: nn.Module) -> None:
        """Takes the model's weights for those that were calibrated."""
        weights = list(model.parameters())
        self.settings["dtype"] = dtype_of(weights)
        digests = [digest_of(weights), *(digest_of(weights, dtype) for dtype in COARSER)]
        self.settings["digests"] = {"weights": sorted(set(digests)), "state": self._state_digest()}
        self.seen = None

    def train(self, mode: bool = True) -> nn.Module:
        if mode or self.training:
            self.seen = None
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self.seen = None  # it holds on to the weights' memory
        return super()._apply(fn, recurse)

    def check_loaded(self) -> None:
        expected = (self.settings["digests"] or {}).get("state")
        if not any(buffer.is_meta for buffer in self.buffers()) and self._state_digest() != expected:
            raise ValueError(
                "decision.state is not what was saved with these settings: the file of one calibration lies beside that of "
                "another, or of none; save the calibrated model again, or take `decision` out of config.json"
            )

    def _state_digest(self) -> str:
        return digest_of(self.get_buffer(name) for name in sorted(self.settings["state"]))  # JSON sorts names, too


@contextmanager
def uncalibrated(model: nn.Module) -> Iterator[None]:
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


# The settings: what they may be, wherever they come from


def check_settings(settings: Any, num_parameters: float) -> None:
    """Refuses what `calibrate` cannot have written, with the name of the field."""
    fields = ("temperature", "detector", "threshold", "sets", "alpha", "dtype", "state", "digests", "sentences")
    _check_fields("decision", settings, fields, optional=("classes", "prompts"))
    check_temperature(settings["temperature"], "decision.temperature")
    detector, sets, digests = (settings[name] for name in ("detector", "sets", "digests"))
    _check_fields("decision.detector", detector, ("name", "by", "settings"))
    try:
        method = check_detector(**detector, multi_label=False)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"decision.detector: {error}") from error
    _check("detector.name", detector["name"], detector["name"] != "vim", "a detector whose score does not scale")
    _check_fields("decision.detector.settings", detector["settings"], method.settings)
    if settings["threshold"] is not None:
        low, high = method.bounds
        wanted = f"a number from {low} to {high}, what {detector['name']} gives"
        _check("threshold", settings["threshold"], _is_threshold(settings["threshold"], low, high), wanted)
    if sets is not None:
        _check_fields("decision.sets", sets, ("method", "thresholds", "by_class", "k_reg", "penalty", "allow_empty"))
        try:
            check_sets(sets["method"], sets["k_reg"], sets["penalty"])
        except ValueError as error:
            raise ValueError(f"decision.sets: {error}") from error
        for name in ("by_class", "allow_empty"):
            _check(f"sets.{name}", sets[name], isinstance(sets[name], bool), "True or False")
        found = sets["thresholds"]
        counts = isinstance(found, list) and (len(found) > 1 if sets["by_class"] else len(found) == 1)
        suits = counts and all(_is_threshold(each, 0, math.inf) for each in found)
        _check("sets.thresholds", found, suits, "one number that is not negative, or with by_class one for each class")
    suits = settings["alpha"] is None if sets is None else is_number(settings["alpha"]) and 0 < settings["alpha"] < 1
    _check("alpha", settings["alpha"], suits, "a share between 0 and 1, and None without sets")
    dtype = getattr(torch, str(settings["dtype"]), None)
    suits = settings["dtype"] is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)
    _check("dtype", settings["dtype"], suits, "the name of a dtype")
    _check_fields("decision.state", settings["state"], method.state)
    most = max(2**26, 16 * num_parameters)  # bounds the memory that a config alone can ask for
    for name, shape in settings["state"].items():
        suits = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        _check(f"state.{name}", shape, suits and math.prod(shape) <= most, f"a shape of at most {most:,} numbers")
    if digests is not None:
        _check_fields("decision.digests", digests, ("weights", "state"))
        _check("digests.weights", digests["weights"], _are_texts(digests["weights"]), "a list of digests")
        _check("digests.state", digests["state"], isinstance(digests["state"], str), "a digest")
    _check("sentences", settings["sentences"], _are_texts(settings["sentences"]), "a list of sentences")
    classes, prompts = settings.get("classes"), settings.get("prompts")
    _check("classes", classes, classes is None or _are_texts(classes), "a list of names")
    _check("prompts", prompts, prompts is None or isinstance(prompts, str), "a digest")


def check_temperature(value: Any, name: str = "temperature") -> None:
    if not (is_number(value) and 0 < value < math.inf):
        raise ValueError(f"{name} is {value!r}: pass a positive number")


def check_sets(method: str, k_reg: int | None, penalty: float | None, num_classes: float = math.inf) -> None:
    """Refuses an unknown method of prediction sets, and settings that it does not have."""
    if method not in SET_METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(SET_METHODS)}")
    if method != "raps":
        if k_reg is not None or penalty is not None:
            raise ValueError(f"k_reg and penalty belong to raps, method is {method!r}: leave them out")
        return
    if type(k_reg) is not int or not 0 <= k_reg < num_classes:
        raise ValueError(
            f"k_reg is {k_reg!r}, there are {num_classes} classes: pass a whole number from 0 to {num_classes - 1}, as no "
            "rank is above a larger one, or choose aps"
        )
    if not (is_number(penalty) and 0 < penalty < math.inf):
        raise ValueError(f"penalty is {penalty!r}: pass a positive number, such as 0.01, or choose aps")


def _is_threshold(value: Any, low: float, high: float) -> bool:
    """JSON has no infinity: it is written as text."""
    value = float(value) if value in ("inf", "-inf") else value
    return is_number(value) and low - ROUNDING <= value <= high + ROUNDING


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _check(name: str, value: Any, suits: bool, wanted: str) -> None:
    if not suits:
        raise ValueError(f"decision.{name} is {str(value)[:100]!r}: it must be {wanted}; calibrate the model again")


def _check_fields(name: str, value: Any, fields: Iterable[str], optional: Iterable[str] = ()) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}: it must be a dict; calibrate the model again")
    for field in set(fields) ^ (set(value) - set(optional)):
        found = "is missing" if field in fields else "is unknown"
        raise ValueError(f"{name}.{field} {found}: calibrate the model again")


# The weights: what they were when they were calibrated

COARSER = (torch.float32, torch.bfloat16, torch.float16)  # what a model may be cast to before it answers
VERSION_OF = attrgetter("_version")
NUMBERS_PER_PASS = 2**20  # bounds the memory of a checksum


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> str:
    """A digest of every bit of the tensors, the same on every device.

    dtype: as if they were cast to it; those that are no finer stay as they are
    """
    digest, checksums = hashlib.sha256(), []
    for tensor in _plain(tensors):
        is_finer = dtype is not None and tensor.is_floating_point()
        is_finer = is_finer and torch.finfo(tensor.dtype).eps < torch.finfo(dtype).eps
        own = dtype if is_finer else tensor.dtype
        digest.update(f"{tuple(tensor.shape)} {own} ".encode())
        checksums.append(_checksum(tensor.reshape(-1), own))
    for checksum in checksums:  # all are under way before the first is waited for
        digest.update(f"{checksum.tolist()} ".encode())
    return digest.hexdigest()


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
    """That of most weights that are floating-point numbers: "float32"."""
    names = [str(weight.dtype).removeprefix("torch.") for weight in weights if weight.is_floating_point()]
    return max(set(names), key=names.count, default=None)


def weights_of_replica(model: nn.Module) -> list[Tensor]:
    """In the order of `model.parameters()`."""
    found = (each for module in model.modules() for each in vars(module).get("_former_parameters", {}).values())
    return list({id(weight): weight for weight in found if weight is not None}.values())


@dataclass(frozen=True)
class SeenWeights:
    """Weights that were compared, and what tells without reading them that nobody has replaced or changed them since.

    owners, names: the modules' own dicts of parameters, and the name of each weight in its dict
    """

    weights: list[nn.Parameter]
    owners: list[dict[str, nn.Parameter | None]]
    names: list[str]
    stamp: tuple[int, bool]
    are_calibrated: bool

    @classmethod
    def of(cls, model: nn.Module, weights: list[nn.Parameter], are_calibrated: bool) -> "SeenWeights":
        places = {}
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    places.setdefault(weight, (module._parameters, name))
        owners, names = zip(*places.values(), strict=True)
        return cls(weights, list(owners), list(names), _stamp(weights), are_calibrated)

    def is_untouched(self) -> bool:
        in_place = all(map(is_, map(dict.get, self.owners, self.names), self.weights))
        return in_place and _stamp(self.weights) == self.stamp


def _stamp(weights: list[nn.Parameter]) -> tuple[int, bool]:
    """Changes with every operation that writes into a weight, and where PEFT has frozen the weights for its adapters."""
    is_trained = weights[0].requires_grad
    try:
        return sum(map(VERSION_OF, weights)), is_trained
    except RuntimeError:  # made in inference mode, where nobody writes
        return 0, is_trained
