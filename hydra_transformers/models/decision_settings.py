"""The settings of a decision: typed, and checked when they are read from a config or a file.

A task adds settings of its own in a subclass. Ships with calibrated models alone.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .task import TASKS, load_class, load_task


VERSION = 2
# Packages up to 0.3 leave out settings that they do not know. A decision that depends on one of these has a version
# that they refuse, or it would answer every row there.
NEWER_VERSION = 3
NEWER_SETTINGS = ("thresholds", "by_group")
RECALIBRATE = "call calibrate() again"


# Readers: a value as JSON has it -> the value as it is used; they raise a ValueError for what `calibrate` cannot have written


def text(value: Any) -> str:
    _require(isinstance(value, str))
    return value


def texts(value: Any) -> tuple[str, ...]:
    _require(isinstance(value, (list, tuple)))
    return tuple(map(text, value))


def number(value: Any) -> float:
    _require(type(value) in (int, float) and math.isfinite(value))
    return float(value)


def whole(value: Any) -> int:
    _require(type(value) is int)
    return value


def positive(value: Any) -> float:
    _require(number(value) > 0)
    return float(value)


def share(value: Any) -> float:
    _require(0 < number(value) < 1)
    return float(value)


def numbers(value: Any) -> tuple[float, ...]:
    _require(isinstance(value, (list, tuple)))
    return tuple(map(number, value))


def positive_numbers(value: Any) -> tuple[float, ...]:
    _require(isinstance(value, (list, tuple)))
    return tuple(map(positive, value))


def limit(value: Any) -> float:
    """A number, or the text "inf" or "-inf", as `calibrate` writes the limits that all or no rows keep."""
    if value in ("inf", "-inf"):
        return float(value)
    return number(value)


def limits(value: Any) -> tuple[float, ...]:
    _require(isinstance(value, (list, tuple)))
    return tuple(map(limit, value))


def mapping(value: Any) -> dict[str, Any]:
    _require(isinstance(value, Mapping))
    return dict(value)


def shapes(value: Any) -> dict[str, tuple[int, ...]]:
    for shape in mapping(value).values():
        _require(isinstance(shape, (list, tuple)) and all(type(size) is int and size > 0 for size in shape))
    return {name: tuple(shape) for name, shape in value.items()}


def optional(read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Make a reader that leaves None as it is."""

    def read_or_none(value: Any) -> Any:
        return None if value is None else read(value)

    return read_or_none


def setting(read: Callable[[Any], Any], is_saved_as_none: bool = True, **default: Any) -> Any:
    """Declare a field that `read` reads; without a default it has to be there.

    is_saved_as_none: whether None is saved, too, and not left out
    """
    return dataclasses.field(metadata={"read": read, "is_saved_as_none": is_saved_as_none}, **default)


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError


# The settings


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings that are read from JSON, and become JSON again."""

    @classmethod
    def read(cls, saved: Any, name: str = "decision") -> Any:
        """Check settings as JSON has them. Unknown ones are left out; they are of a later version.

        name: what messages call them
        """
        if not isinstance(saved, Mapping):
            raise ValueError(f"{name} is {str(saved)[:100]!r} and holds no settings: {RECALIBRATE}")
        values = {}
        for field in dataclasses.fields(cls):
            if field.name in saved:
                try:
                    values[field.name] = field.metadata["read"](saved[field.name])
                except (ValueError, TypeError) as error:
                    raise ValueError(
                        str(error) or f"{name}.{field.name} is {str(saved[field.name])[:200]}: {RECALIBRATE}"
                    ) from error
            elif _has_no_default(field):
                raise ValueError(f"{name}.{field.name} is missing: {RECALIBRATE}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Return the settings as JSON has them, which has no infinity."""
        saved = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None or field.metadata["is_saved_as_none"]:
                saved[field.name] = _as_json(value)
        return saved

    def __getitem__(self, name: str) -> Any:
        """Return a setting as JSON has it: code that was saved before version 0.4 reads a dict."""
        return self.to_dict()[name]


def _has_no_default(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _as_json(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {name: _as_json(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_as_json(part) for part in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value


@dataclass(frozen=True, kw_only=True)
class DetectorSettings(Settings):
    """What `detector_score` is.

    name: "msp", "knn", "width", ...
    by, settings: of single-label classification, see `detection.score`
    """

    name: str = setting(text)
    by: str | None = setting(optional(text), is_saved_as_none=False, default=None)
    settings: dict[str, Any] | None = setting(optional(mapping), is_saved_as_none=False, default=None)


@dataclass(frozen=True, kw_only=True)
class Digests(Settings):
    """weights: of the model's weights in their dtype and in coarser ones; state: of the decision's tensors; settings: of the
    settings, None where they were saved before version 0.4"""

    weights: tuple[str, ...] = setting(texts)
    state: str = setting(text)
    settings: str | None = setting(optional(text), default=None)


def name_of_group(value: Any) -> str:
    """Return the name of the group that a value stands for: the number 3 has the same as 3.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value)


def places_of_groups(groups: Sequence[Any], names: Sequence[str]) -> Tensor:
    """Return the place of each group among the names, (rows,); -1 for one that is not among them."""
    places = {name: place for place, name in enumerate(names)}
    return torch.tensor([places.get(name_of_group(group), -1) for group in groups], dtype=torch.long)


@dataclass(frozen=True, kw_only=True)
class GroupSettings(Settings):
    """Thresholds by the groups of a column that is known when predicting.

    column: of the data, whose values name the groups
    names: of the groups of the validation rows
    thresholds: of each, the highest score that is answered; -inf where nothing can be promised
    """

    column: str = setting(text)
    names: tuple[str, ...] = setting(texts)
    thresholds: tuple[float, ...] = setting(limits)

    @classmethod
    def read(cls, saved: Any, name: str = "decision.by_group") -> Any:
        settings = super().read(saved, name)
        if len(settings.names) != len(settings.thresholds):
            raise ValueError(
                f"{name} has {len(settings.names)} names and {len(settings.thresholds)} thresholds: {RECALIBRATE}"
            )
        return settings

    def indices(self, groups: Sequence[Any]) -> Tensor:
        """Return the index of each row's group, (rows,), as a model's `group=` takes it.

        -1 is that of a group which no validation row has: it is not answered.
        """
        return places_of_groups(groups, self.names)

    def are_above(self, detector_score: Tensor, group: Tensor | None) -> Tensor:
        """Return which rows not to answer, (batch,) bool: all without a group, or with one of another index.

        detector_score: (batch,); group: (batch,), indices of `names`
        """
        if group is None:
            return torch.ones_like(detector_score, dtype=torch.bool)
        group = group.to(detector_score.device)
        thresholds = torch.tensor(self.thresholds, dtype=detector_score.dtype, device=detector_score.device)
        is_known = (group >= 0) & (group < len(self.names))
        highest = thresholds[group.clamp(0, len(self.names) - 1)]
        return ~is_known | ~(detector_score <= highest)


def _of(settings_class: type[Settings], name: str) -> Callable[[Any], Any]:
    return lambda saved: settings_class.read(saved, f"decision.{name}")


@dataclass(frozen=True, kw_only=True)
class DecisionSettings(Settings):
    """The config's `decision`, of any task.

    task: one of `task.TASKS`
    detector: what `detector_score` is
    threshold: None, or the highest score that is not refused. It lies between two scores of the fitting rows, so that
        rounding does not move rows across it
    alpha: the share of the sets or intervals that may miss the right class or value; None without them
    config: the `CONFIG_FIELDS` that the model had
    inference: other fields of its config that change its predictions, see `inference_settings`; None where it was
        calibrated before version 0.4
    dtype: of its weights
    state: the shapes of the decision's tensors by name
    sentences: what was fitted on what, and what it promises
    validation: what a `Monitor` compares with; None where the model was calibrated before there were monitors
    by_group: where promises are made by a column, the thresholds of its groups; `threshold` is the highest of them
    """

    task: str = setting(text)
    detector: DetectorSettings = setting(_of(DetectorSettings, "detector"))
    threshold: float | None = setting(optional(limit), default=None)
    alpha: float | None = setting(optional(share), default=None)
    config: dict[str, Any] = setting(mapping, default_factory=dict)
    inference: dict[str, Any] | None = setting(optional(mapping), is_saved_as_none=False, default=None)
    dtype: str | None = setting(optional(text), default=None)
    state: dict[str, tuple[int, ...]] = setting(shapes, default_factory=dict)
    digests: Digests | None = setting(optional(_of(Digests, "digests")), default=None)
    sentences: tuple[str, ...] = setting(texts, default=())
    validation: dict[str, Any] | None = setting(optional(mapping), is_saved_as_none=False, default=None)
    by_group: GroupSettings | None = setting(optional(GroupSettings.read), is_saved_as_none=False, default=None)
    version: int = setting(whole, default=VERSION)

    @property
    def temperature_or_one(self) -> float:
        """What logits are divided by; 1 where the task has no temperature."""
        return getattr(self, "temperature", 1.0)

    def digest(self) -> str:
        """Return a digest of the settings, without the digests among them."""
        return digest_of_settings(self.to_dict())

    def prediction_fields(self, outputs: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the fields of a pipeline's prediction for one row that say whether to abstain, by what, and why.

        outputs: the model's, by this decision
        """
        detector_score = outputs["detector_score"][0].item()
        if self.by_group is not None:
            # The group is not among the outputs: see `with_group`.
            return {
                "abstain": True,
                "detector": self.detector.name,
                "detector_score": detector_score,
                "threshold": None,
                "reason": f"It answers by the {self.by_group.column}, which is not given.",
            }
        threshold = self.threshold_of(outputs)
        abstain = None if threshold is None else outputs["abstain"][0].item()
        reason = self.reason(detector_score, outputs) if abstain else None
        return {
            "abstain": abstain,
            "detector": self.detector.name,
            "detector_score": detector_score,
            "threshold": _as_json(threshold),
            "reason": reason,
        }

    def fields_for_any_client(self) -> dict[str, Any]:
        """Return what lets a client abstain that knows classes and scores alone; empty where these do not tell.

        They are saved at the top of config.json, see `configuration_hydra.saved_with`.
        """
        return {}

    def threshold_of(self, outputs: Mapping[str, Tensor]) -> float | None:
        """Return the highest score that is answered, for one row."""
        return self.threshold

    def reason(self, detector_score: float, outputs: Mapping[str, Tensor]) -> str:
        """Say in a sentence why the model abstains on a row."""
        return self.comparison(detector_score, self.threshold_of(outputs))

    def comparison(self, detector_score: float, threshold: float) -> str:
        """Say in a sentence that a score is above a threshold."""
        score_name = "msp (1 - the largest probability)" if self.detector.name == "msp" else self.detector.name
        return f"{score_name} is {detector_score:.3g}, above the threshold {threshold:.3g}."

    def with_groups(self, predictions: Sequence[Mapping[str, Any]], groups: Any) -> list[dict[str, Any]]:
        """Return predictions of a pipeline with what their groups decide.

        predictions: a dict for each row, in which nothing is changed
        groups: the group of each row, by its name
        """
        if self.by_group is None:
            raise ValueError("groups is for a model that was calibrated with by=column: leave it out")
        if isinstance(groups, str) or not isinstance(groups, Sequence) or len(groups) != len(predictions):
            count = len(groups) if isinstance(groups, Sequence) else "not a list"
            raise ValueError(
                f"groups has {count}, and there are {len(predictions)} inputs: pass the {self.by_group.column} of each"
            )
        return [self._with_group(prediction, group) for prediction, group in zip(predictions, groups, strict=True)]

    def _with_group(self, prediction: Mapping[str, Any], group: Any) -> dict[str, Any]:
        """Return one row's prediction with the threshold of its group.

        One that has a threshold is decided already: an empty input, say, is not answered in any group.
        """
        if prediction["threshold"] is not None:
            return dict(prediction)
        [place] = self.by_group.indices([group]).tolist()
        named = f"{self.by_group.column} {str(group)[:100]!r}"
        detector_score = prediction["detector_score"]
        threshold = -math.inf
        reason = f"Nothing can be promised of the {named}: no validation row has it."
        if place >= 0:
            threshold = self.by_group.thresholds[place]
            reason = f"Nothing can be promised of the {named}: it had too few validation rows, or too many errors."
            if threshold > -math.inf:
                reason = f"{self.comparison(detector_score, threshold).removesuffix('.')} of the {named}."
        abstain = not detector_score <= threshold
        if not abstain:
            reason = None
        return {**prediction, "abstain": abstain, "threshold": _as_json(threshold), "reason": reason}


def version_needed(saved: Mapping[str, Any]) -> int:
    """Return the version of settings as JSON has them: the lowest whose packages read all that decides."""
    is_newer = any(saved.get(name) is not None for name in NEWER_SETTINGS)
    return NEWER_VERSION if is_newer else VERSION


def digest_of_settings(saved: Mapping[str, Any]) -> str:
    """Return a digest of settings as JSON has them, without the digests among them."""
    covered = {name: value for name, value in saved.items() if name != "digests"}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


# Of single-label classification; those of other tasks lie beside them


@dataclass(frozen=True, kw_only=True)
class Sets(Settings):
    """method: "lac"; threshold: the highest 1 - probability of a class that is in the set"""

    method: str = setting(text)
    threshold: float = setting(limit)


@dataclass(frozen=True, kw_only=True)
class SingleLabelSettings(DecisionSettings):
    """temperature: of the ensemble, see `pool_then_scale`
    sets: None without sets
    classes, prompts: of a zero-shot classifier, the names of its classes and a digest of the prompts
    thresholds: where promises are made by predicted class, the highest score of each that is answered; `threshold` is the
        highest of them
    """

    temperature: float = setting(positive)
    sets: Sets | None = setting(optional(lambda saved: Sets.read(saved, "decision.sets")), default=None)
    classes: tuple[str, ...] | None = setting(optional(texts), is_saved_as_none=False, default=None)
    prompts: str | None = setting(optional(text), is_saved_as_none=False, default=None)
    thresholds: tuple[float, ...] | None = setting(optional(limits), is_saved_as_none=False, default=None)

    def fields_for_any_client(self) -> dict[str, Any]:
        is_score_of_answer = self.detector.name == "msp" and self.detector.by in (None, "mean")
        has_others = any(getattr(self, name) is not None for name in NEWER_SETTINGS)
        has_one_threshold = self.threshold is not None and not has_others
        if not is_score_of_answer or not has_one_threshold or self.classes is not None:
            return {}
        # Scores lie between 0 and 1: where the threshold is infinite, none or all of them are below.
        abstain_below = min(max(1 - self.threshold, 0.0), 2.0)
        return {"abstain_below": abstain_below, "promise": " ".join(self.sentences)}

    def threshold_of(self, outputs: Mapping[str, Tensor]) -> float | None:
        if self.thresholds is None:
            return self.threshold
        return self.thresholds[int(outputs["logits"][0].argmax())]

    def reason(self, detector_score: float, outputs: Mapping[str, Tensor]) -> str:
        reason = super().reason(detector_score, outputs)
        if self.thresholds is not None:
            reason = f"{reason.removesuffix('.')} of this prediction."
            if self.threshold_of(outputs) == -math.inf:
                reason = (
                    "Nothing can be promised of this prediction: it had too few validation rows, or too many errors."
                )
        if self.sets is not None and outputs["prediction_set"][0].sum() == 1:
            right = f"{100 * (1 - self.alpha):.3g} %"
            reason += f" Prediction sets are right for {right} of all rows, less often for rows as unsure as this one."
        return reason


def typed_settings(saved: DecisionSettings | Mapping[str, Any]) -> DecisionSettings:
    """Return the typed settings of a config's `decision`; a decision whose code is of before version 0.4 has no others."""
    if not isinstance(saved, Mapping):
        return saved
    name = saved.get("task")
    if name not in TASKS:
        raise ValueError(f"decision.task is {str(name)[:100]!r}: pass one of {', '.join(TASKS)}")
    return load_class(load_task(name).settings_class).read(saved)
