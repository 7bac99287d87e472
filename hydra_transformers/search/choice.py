"""The target of a search, the candidate that it chooses, and the reasons."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..reports.gains import NO_DIFFERENCE, Gain
from .candidates import SOUP, Candidate, best_first


POINTS = 0.5  # of quality that "balance" gives up for time, and of accuracy that "quality" gives up for detection
FORMS = '"balance", "quality", {"cost": 1.3} or {"accuracy_within": 0.5}'


@dataclass(frozen=True)
class Target:
    """The target of `hydrate`; `target_of` makes one.

    kind: "balance", the fastest Hydra whose quality is at most `value` points below the best Hydra's;
        "cost", the best quality among Hydras that take at most `value` times one model's time;
        "accuracy_within", the best detection among Hydras whose accuracy is at most `value` points below the best Hydra's
    """

    kind: str
    value: float

    def __str__(self) -> str:
        return "balance" if self.kind == "balance" else f"{self.kind} {self.value:g}"


def target_of(target: Any, has_ood_data: bool) -> Target:
    """Reads a target as users pass it: "balance", "quality", {"cost": 1.3} or {"accuracy_within": 0.5}."""
    if target == "balance":
        return Target("balance", POINTS)
    found = {"accuracy_within": POINTS} if target == "quality" else target
    if not isinstance(found, Mapping) or len(found) != 1 or next(iter(found)) not in ("cost", "accuracy_within"):
        raise ValueError(f"target is {target!r}: pass {FORMS}")
    [(kind, value)] = found.items()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ValueError(f"target has {kind} {value!r}: pass a number, such as {FORMS}")
    if kind == "cost" and value == 0:
        raise ValueError("target has cost 0, which nothing meets: pass a multiple of one model's time, such as 1.3")
    if kind == "accuracy_within" and not has_ood_data:
        raise ValueError(
            f"target is {target!r}, the best detection, and without ood_data that is not measured: pass ood_data, or the "
            'target "balance"'
        )
    return Target(kind, float(value))


def in_order(candidates: Sequence[Candidate], target: Target) -> list[Candidate]:
    """The Hydras that meet the target, the choice first."""
    hydras = best_first([each for each in candidates if each.is_hydra])
    if not hydras:
        return []
    if target.kind == "cost":
        return [each for each in hydras if each.time <= target.value]
    if target.kind == "balance":
        least = hydras[0].quality - target.value / 100
        return sorted((each for each in hydras if each.quality >= least), key=lambda each: each.time)
    least = max(each.accuracy for each in hydras) - target.value / 100
    return sorted((each for each in hydras if each.accuracy >= least), key=lambda each: -each.detection)


def choose(candidates: Sequence[Candidate], target: Target) -> Candidate:
    """The candidate that fits the target best."""
    found = in_order(candidates, target)
    if found:
        return found[0]
    hydras = [each for each in candidates if each.is_hydra]
    if not hydras:
        raise ValueError(
            "no Hydra could be made of these models: pass several fine-tunings, or more data for circuits"
        )
    fastest = min(hydras, key=lambda each: each.time)
    raise ValueError(
        f"no Hydra takes at most {target.value:g} times one model's time: the fastest, {fastest.name}, takes "
        f"{fastest.time:.2f}, so pass a higher cost; what was measured is kept"
    )


def next_best(candidates: Sequence[Candidate], target: Target, count: int = 3) -> list[Candidate]:
    """The choices that would follow if each choice before was left out."""
    found: list[Candidate] = []
    for _ in range(count + 1):
        left = in_order([each for each in candidates if each not in found], target)
        found += left[:1]
    return found[1:]


def why(chosen: Candidate, candidates: Sequence[Candidate], target: Target, gains: Mapping[str, Gain]) -> str:
    """The choice and its reasons in a few sentences.

    gains: name of every other candidate -> its gain in quality over the chosen one; empty of tasks without intervals
    """
    hydras = [each for each in candidates if each.is_hydra]
    reasons = {
        "balance": f"the fastest of those at most {target.value:g} points of quality below the highest",
        "cost": f"the highest in quality within {target.value:g} times one model's time",
        "accuracy_within": f"the highest in detection with {'an' if chosen.measure == 'accuracy' else 'the'} {chosen.measure} at most "
        f"{target.value:g} points below the highest",
    }
    sentences = [f"{chosen.name} ({chosen.sentence}) is {reasons[target.kind]}, of {len(hydras)} Hydras."]
    best = best_first(hydras)[0]
    if best is not chosen and target.kind != "accuracy_within":
        sentences.append(f"The highest quality has {best.name} ({best.sentence}): {_compared(best, chosen, gains)}.")
    others = [gains[each.name] for each in hydras if each.name in gains]
    equal = sum(gain.verdict == "no difference" for gain in others)
    if equal:
        sentences.append(
            f"Between it and {equal} of the {len(others)} other Hydras there is {NO_DIFFERENCE} in quality."
        )
    rivals = [
        each
        for each in candidates
        if not each.is_hydra and each.time <= chosen.time and not _is_worse(each, chosen, gains)
    ]
    if rivals:
        rival = best_first(rivals)[0]
        beside = ", which has no members to disagree," if rival.design.kind == SOUP else ""
        sentences.append(
            f"But {rival.name}{beside} is no slower ({rival.sentence}): {_compared(rival, chosen, gains)}."
        )
    return " ".join(sentences)


def _is_worse(one: Candidate, chosen: Candidate, gains: Mapping[str, Gain]) -> bool:
    return gains[one.name].verdict == "worse" if one.name in gains else one.quality < chosen.quality


def _compared(one: Candidate, chosen: Candidate, gains: Mapping[str, Gain]) -> str:
    gain = gains.get(one.name)
    if gain is None:
        return f"{100 * (one.quality - chosen.quality):+.1f} points on these rows"
    if gain.verdict == "no difference":
        return NO_DIFFERENCE
    return f"{gain.verdict}, {100 * gain.change.low:+.1f} to {100 * gain.change.high:+.1f} points"
