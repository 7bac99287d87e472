"""The gain of one model over another on the same rows, and whether these rows can show it."""

import base64
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..uncertainty.paired import Change, accuracy_change, auroc_change, mean_change, quality_change


if TYPE_CHECKING:
    from .report import ModelResult

NO_DIFFERENCE = "no difference that these rows can show"


@dataclass(frozen=True)
class Gain:
    """How a metric changes from one model to another on the same rows, with a 95 % interval.

    Attributes:
        metric: "accuracy", "NLL", "AUROC" (or "near AUROC", one for each OOD group) or "quality".
        change: as a fraction, or in nats; see `Change`.
    """

    metric: str
    change: Change

    @property
    def verdict(self) -> str:
        """ "better" or "worse" where all of the interval lies on one side of 0, otherwise "no difference"."""
        low, high = self.change.low, self.change.high
        if self.metric == "NLL":
            low, high = -high, -low
        return "better" if low > 0 else "worse" if high < 0 else "no difference"

    def __str__(self) -> str:
        factor, form, unit = (1, "+.3f", "") if self.metric == "NLL" else (100, "+.1f", " points")
        values = (self.change.difference, self.change.low, self.change.high)
        difference, low, high = (format(factor * value, form) for value in values)
        return f"{self.metric} ({difference}{unit}, 95 % interval {low} to {high})"


def gains(result: "ModelResult", other: "ModelResult") -> dict[str, Gain]:
    """The gains of `result` over `other`: metric -> `Gain`, for accuracy, NLL, the AUROC of each OOD group, and with OOD
    data the quality that `hydrate` chooses by (the mean of accuracy and of the groups' mean AUROC).

    Both must be results on the same data; empty where a report from elsewhere has no rows. Another order of the rows
    (a shuffled DataLoader) makes the intervals wider, not wrong.
    """
    mine, theirs = unpacked_rows(result.rows), unpacked_rows(other.rows)
    if not mine or not theirs:
        return {}
    sizes = [map_leaves(rows, len) for rows in (mine, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the models answered other rows ({sizes[0]} and {sizes[1]}): compare them on the same data")
    found = {
        "accuracy": accuracy_change(theirs["correct"], mine["correct"]),
        "NLL": mean_change(theirs["nll"], mine["nll"]),
    }
    known = (theirs["score"], mine["score"])
    groups = {
        group: [(theirs["ood"][group][name], scores) for name, scores in sets.items()]
        for group, sets in mine["ood"].items()
    }
    for group, sets in groups.items():
        found["AUROC" if group == "OOD" else f"{group} AUROC"] = auroc_change(*known, sets)
    if groups:
        found["quality"] = quality_change((theirs["correct"], mine["correct"]), known, list(groups.values()))
    return {metric: Gain(metric, change) for metric, change in found.items()}


def gain_sentence(name: str, other: str, found: Mapping[str, Gain]) -> str:
    """The result of `gains` as a sentence: "Hydra against Single: better in accuracy (+1.5 points, ...); no difference that
    these rows can show in NLL"."""
    shown = [gain for metric, gain in found.items() if metric != "quality"]
    clauses = []
    for verdict, words in (("better", "better"), ("worse", "worse"), ("no difference", NO_DIFFERENCE)):
        those = [gain.metric if words == NO_DIFFERENCE else str(gain) for gain in shown if gain.verdict == verdict]
        clauses += [f"{words} in {', '.join(those)}"] if those else []
    return f"{name} against {other}: {'; '.join(clauses)}." if clauses else ""


def packed_rows(known: Mapping[str, Tensor], ood_scores: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
    """The numbers per row that `gains` needs, as 32-bit floats in base64, which keeps a JSON file small.

    known: `sample_values` of the labelled data; ood_scores: group -> data set -> (samples,)
    """
    rows = {name: known[name] for name in ("correct", "nll", "score")} | {"ood": ood_scores}
    return map_leaves(rows, lambda values: base64.b64encode(values.float().numpy().astype("<f4").tobytes()).decode())


def unpacked_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The same with float64 tensors (samples,)."""
    return map_leaves(
        rows, lambda text: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).double()
    )


def map_leaves(content: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to every value in nested dicts and lists."""
    if isinstance(content, Mapping):
        return {name: map_leaves(each, function) for name, each in content.items()}
    if isinstance(content, list):
        return [map_leaves(each, function) for each in content]
    return function(content)
