"""How one model differs from another on the same rows, with 95 % intervals."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..uncertainty.paired import Change, accuracy_change, auroc_change, mean_change
from ..uncertainty.task import Task


NO_DIFFERENCE = "no difference that these rows can show"
GROUPS_LEFT_OUT = 20  # in turn, for the interval of a metric that is not a mean over rows
STUDENT_95 = 2.093  # quantile of Student's t with 19 degrees of freedom


@dataclass(frozen=True)
class Gain:
    """How a metric changes from one model to another on the same rows.

    Attributes:
        metric (`str`): its title: "Accuracy", "NLL", "AUROC" (or "near AUROC", one for each OOD group).
        change (`Change`): the difference and its 95 % interval.
        is_share (`bool`): whether the metric is a share, shown in points.
        higher_is_better (`bool`): which way is better.
    """

    metric: str
    change: Change
    is_share: bool = True
    higher_is_better: bool = True

    @property
    def verdict(self) -> str:
        """ "better" or "worse" where all of the interval lies on one side of 0, otherwise "no difference"."""
        low, high = self.change.low, self.change.high
        if not self.higher_is_better:
            low, high = -high, -low
        return "better" if low > 0 else "worse" if high < 0 else "no difference"

    @property
    def numbers(self) -> list[str]:
        """The difference and the ends of its interval, shares in points."""
        values = (self.change.difference, self.change.low, self.change.high)
        return [f"{100 * value:+.1f}" if self.is_share else f"{value:+.3f}" for value in values]

    def __str__(self) -> str:
        difference, low, high = self.numbers
        return f"{self.metric} ({difference}{' points' * self.is_share}, 95 % interval {low} to {high})"


def gains(task: type[Task], rows: Mapping[str, Any], other_rows: Mapping[str, Any]) -> dict[str, Gain]:
    """What one model gains over another: metric -> `Gain`, for the task's first metric, NLL and the AUROC of each OOD group.

    rows, other_rows: of the two models, from `packed_rows`, on the same data. Empty where a report has no rows. Another order
    of the rows (a shuffled DataLoader) makes the intervals wider, not wrong
    """
    mine, theirs = unpacked_rows(rows), unpacked_rows(other_rows)
    if not mine or not theirs:
        return {}
    sizes = [map_leaves(side, len) for side in (mine, theirs)]
    if sizes[0] != sizes[1]:
        raise ValueError(f"the models have other rows ({sizes[0]} and {sizes[1]}): compare them on the same data")
    metric = next(iter(task.metrics))
    title, better = task.metrics[metric]
    if "correct" in mine:
        results = {metric: Gain(title, accuracy_change(theirs["correct"], mine["correct"]))}
        results["nll"] = Gain("NLL", mean_change(theirs["nll"], mine["nll"]), is_share=False, higher_is_better=False)
    else:
        change = jackknife_change(theirs["first_metric"], mine["first_metric"])
        results = {metric: Gain(title, change, is_share=better == "high", higher_is_better=better == "high")}
    for group, sets in mine["ood"].items():
        scores = [(theirs["ood"][group][name], values) for name, values in sets.items()]
        change = auroc_change(theirs["score"], mine["score"], scores)
        name = "AUROC" if group == "OOD" else f"{group} AUROC"
        results[name] = Gain(name, change)
    return results


def gain_sentence(name: str, other: str, found: Mapping[str, Gain]) -> str:
    """The result of `gains` as a sentence: "Hydra against Single: better in Accuracy (+1.5 points, ...); no difference that
    these rows can show in NLL"."""
    clauses = []
    for verdict, words in (("better", "better"), ("worse", "worse"), ("no difference", NO_DIFFERENCE)):
        texts = [
            gain.metric if words == NO_DIFFERENCE else str(gain) for gain in found.values() if gain.verdict == verdict
        ]
        clauses += [f"{words} in {', '.join(texts)}"] if texts else []
    return f"{name} against {other}: {'; '.join(clauses)}." if clauses else ""


def jackknife_values(measure: Callable[[Tensor], float], num_rows: int) -> Tensor:
    """A metric of all rows, then of all rows but each of 20 random groups; NaN for these with fewer than 20 rows.

    measure: numbers of rows -> the metric on them
    """
    if num_rows < GROUPS_LEFT_OUT:
        without = [math.nan] * GROUPS_LEFT_OUT
        return torch.tensor([measure(torch.arange(num_rows)), *without], dtype=torch.float64)
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    group_of_row = torch.empty(num_rows, dtype=torch.long)
    group_of_row[order] = torch.arange(num_rows) % GROUPS_LEFT_OUT
    subsets = [(group_of_row != group).nonzero().flatten() for group in range(GROUPS_LEFT_OUT)]
    return torch.tensor([measure(rows) for rows in (torch.arange(num_rows), *subsets)], dtype=torch.float64)


def jackknife_change(before: Tensor, after: Tensor) -> Change:
    """The change of a metric, from its `jackknife_values` before and after; with the delete-a-group jackknife's interval."""
    whole, *without = (after - before).tolist()
    if not all(map(math.isfinite, (whole, *without))):
        return Change(whole, -math.inf, math.inf)
    mean = math.fsum(without) / len(without)
    variance = (len(without) - 1) / len(without) * math.fsum((value - mean) ** 2 for value in without)
    reach = STUDENT_95 * math.sqrt(variance)
    return Change(whole, whole - reach, whole + reach)


def packed_rows(values: Mapping[str, Tensor | Mapping[str, Mapping[str, Tensor]]]) -> dict[str, Any]:
    """The numbers per row that `gains` needs, as 32-bit floats in base64, which keeps a JSON file small."""
    return map_leaves(values, lambda leaf: base64.b64encode(leaf.float().numpy().astype("<f4").tobytes()).decode())


def unpacked_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """The same with float64 tensors (samples,)."""
    return map_leaves(
        rows, lambda text: torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32).double()
    )


def map_leaves(content: Any, function: Callable[[Any], Any]) -> Any:
    """Applies a function to every value in nested dicts and lists."""
    if isinstance(content, Mapping):
        return {name: map_leaves(part, function) for name, part in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [map_leaves(part, function) for part in content]
    return function(content)
