"""Checks the settings of a decision, whose config.json may come from anyone."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from .detection import DETECTORS, is_number


ROUNDING = 1e-6  # of scores and sums of probabilities; in doubt a class is in the set
SET_METHODS = ("lac", "aps", "raps")
AGAIN = "calibrate the model again (to load a Hydra without its decision, pass decision=None)"


def check_settings(settings: Any, num_parameters: float) -> None:
    """Refuses what `calibrate` cannot have written, with the name of the field."""
    fields = ("temperature", "detector", "threshold", "sets", "alpha", "dtype", "state", "digests", "sentences")
    check_fields("decision", settings, fields, optional=("pooled", "classes", "prompts"))
    temperature, detector, threshold, sets, alpha = (settings[each] for each in fields[:5])
    check_field("temperature", temperature, is_positive(temperature), "a positive number")
    pooled = settings.get("pooled", False)
    check_field("pooled", pooled, isinstance(pooled, bool), "True or False")
    check_fields("decision.detector", detector, ("name", "by", "settings"))
    name = detector["name"]
    method = DETECTORS.get(name) if isinstance(name, str) and name != "vim" else None
    check_field("detector.name", name, method is not None, "a detector whose score does not scale")
    check_field("detector.by", detector["by"], detector["by"] in method.by, " or ".join(method.by))
    check_fields("decision.detector.settings", detector["settings"], method.settings)
    for setting, value in detector["settings"].items():
        suits = is_positive(value) and (isinstance(value, int) or isinstance(method.settings[setting], float))
        check_field(f"detector.settings.{setting}", value, suits, "a positive number")
    check_threshold(threshold, *method.bounds)
    if sets is not None:
        check_fields("decision.sets", sets, ("method", "thresholds", "by_class", "k_reg", "penalty", "allow_empty"))
        try:
            check_sets(sets["method"], sets["k_reg"], sets["penalty"])
        except ValueError as error:
            raise ValueError(f"decision.sets: {error}") from error
        for field in ("by_class", "allow_empty"):
            check_field(f"sets.{field}", sets[field], isinstance(sets[field], bool), "True or False")
        found = sets["thresholds"]
        counts = isinstance(found, list) and (len(found) > 1 if sets["by_class"] else len(found) == 1)
        suits = counts and all(_is_threshold(each, 0, math.inf) for each in found)
        check_field("sets.thresholds", found, suits, "one number from 0 on, or with by_class one for each class")
    suits = alpha is None if sets is None else is_share(alpha)
    check_field("alpha", alpha, suits, "a share between 0 and 1, and None without sets")
    check_common(settings, method.state, num_parameters)
    classes, prompts = settings.get("classes"), settings.get("prompts")
    check_field("classes", classes, classes is None or _are_texts(classes), "a list of names")
    check_field("prompts", prompts, prompts is None or isinstance(prompts, str), "a digest")


def check_common(settings: Mapping[str, Any], state_names: Iterable[str], num_parameters: float) -> None:
    """Checks what the decision of every task has: dtype, state, digests and sentences.

    state_names: the tensors that `state` describes
    """
    dtype, state, digests, sentences = (settings[each] for each in ("dtype", "state", "digests", "sentences"))
    found = getattr(torch, str(dtype), None)
    suits = dtype is None or (isinstance(found, torch.dtype) and found.is_floating_point)
    check_field("dtype", dtype, suits, "the name of a dtype")
    check_fields("decision.state", state, state_names)
    most = max(2**26, 16 * num_parameters)  # bounds the memory that a config alone can ask for
    for field, shape in state.items():
        suits = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
        suits = suits and math.prod(shape) <= most
        check_field(f"state.{field}", shape, suits, f"a shape of at most {most:,} numbers")
    if digests is not None:
        check_fields("decision.digests", digests, ("weights", "state"))
        check_field("digests.weights", digests["weights"], _are_texts(digests["weights"]), "a list of digests")
        check_field("digests.state", digests["state"], isinstance(digests["state"], str), "a digest")
    check_field("sentences", sentences, _are_texts(sentences), "a list of sentences")


def check_threshold(threshold: Any, low: float, high: float) -> None:
    """Refuses a threshold that is no score from low to high; None is one that nothing exceeds."""
    suits = threshold is None or _is_threshold(threshold, low, high)
    check_field("threshold", threshold, suits, f"a number from {low} to {high}, as the scores are")


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
    if not is_positive(penalty):
        raise ValueError(f"penalty is {penalty!r}: pass a positive number, such as 0.01, or choose aps")


def is_positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def is_share(value: Any) -> bool:
    return is_number(value) and 0 < value < 1


def _is_threshold(value: Any, low: float, high: float) -> bool:
    """JSON has no infinity: it is written as text."""
    value = float(value) if value in ("inf", "-inf") else value
    return is_number(value) and low - ROUNDING <= value <= high + ROUNDING


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def check_field(name: str, value: Any, suits: bool, wanted: str) -> None:
    if not suits:
        raise ValueError(f"decision.{name} is {str(value)[:100]!r}: it must be {wanted}; {AGAIN}")


def check_fields(name: str, value: Any, fields: Iterable[str], optional: Iterable[str] = ()) -> None:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is a {type(value).__name__}: it must be a dict; {AGAIN}")
    for field in set(fields) ^ (set(value) - set(optional)):
        found = "is missing" if field in fields else "is unknown"
        raise ValueError(f"{name}.{field} {found}: {AGAIN}")
