"""How one model differs from another on the same rows, with 95 % intervals."""

import base64
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..uncertainty.paired import Change, accuracy_change, auroc_change, mean_change
from ..uncertainty.task import TaskFit


NO_DIFFERENCE = "no difference that these rows can show"
GROUPS_LEFT_OUT = 20  # in turn, for the interval of a metric that is not a mean over rows
STUDENT_95 = 2.093  # quantile of Student's t with 19 degrees of freedom


@dataclass(frozen=True)
class Gain:
    """How a metric changes from one model to another on the same rows.

    Attributes:
        metric (`str`): its title: "Accuracy", "NLL", "AUROC" (or "near AUROC", one for each OOD
            group).
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
        """Whether all of the interval lies on one side of 0: "better", "worse", "no difference"."""
        if self.change.low > 0:
            return "better" if self.higher_is_better else "worse"
        if self.change.high < 0:
            return "worse" if self.higher_is_better else "better"
        return "no difference"

    @property
    def numbers(self) -> list[str]:
        """The difference and the ends of its interval, shares in points."""
        values = (self.change.difference, self.change.low, self.change.high)
        if self.is_share:
            return [f"{100 * value:+.1f}" for value in values]
        return [f"{value:+.3f}" for value in values]

    def __str__(self) -> str:
        difference, low, high = self.numbers
        if self.is_share:
            difference += " points"
        return f"{self.metric} ({difference}, 95 % interval {low} to {high})"


def gains(task: type[TaskFit], rows: Mapping[str, Any], other_rows: Mapping[str, Any]) -> dict[str, Gain]:
    """Return what one model gains over another: metric -> `Gain`.

    The metrics are the task's first one, NLL and the AUROC of each OOD group.

    Args:
        task (`type`): of both models.
        rows (`Mapping`), other_rows (`Mapping`): of the two models, from `packed_rows`, on the same
            data. Empty where a report has no rows. Another order of the rows (a shuffled
            DataLoader) makes the intervals wider, not wrong.
    """
    mine = unpacked_rows(rows)
    theirs = unpacked_rows(other_rows)
    if not mine or not theirs:
        return {}
    my_sizes = map_leaves(mine, len)
    their_sizes = map_leaves(theirs, len)
    if my_sizes != their_sizes:
        raise ValueError(f"the models have other rows ({my_sizes} and {their_sizes}): compare them on the same data")

    # The task's first metric, a mean over rows for classifiers.
    metric = next(iter(task.metrics))
    title, better = task.metrics[metric]
    results = {}
    if "correct" in mine:
        results[metric] = Gain(title, accuracy_change(theirs["correct"], mine["correct"]))
        nll_change = mean_change(theirs["nll"], mine["nll"])
        results["nll"] = Gain("NLL", nll_change, is_share=False, higher_is_better=False)
    else:
        change = jackknife_change(theirs["first_metric"], mine["first_metric"])
        is_high = better == "high"
        results[metric] = Gain(title, change, is_share=is_high, higher_is_better=is_high)

    # Detection, for each group of OOD data sets.
    for group, sets in mine["ood"].items():
        scores = [(theirs["ood"][group][name], values) for name, values in sets.items()]
        change = auroc_change(theirs["score"], mine["score"], scores)
        name = "AUROC" if group == "OOD" else f"{group} AUROC"
        results[name] = Gain(name, change)
    return results


def gain_sentence(name: str, other: str, found: Mapping[str, Gain]) -> str:
    """Write the result of `gains` as a sentence.

    "Hydra against Single: better in Accuracy (+1.5 points, ...); no difference that these rows can
    show in NLL"
    """
    clauses = []
    for verdict, words in (("better", "better"), ("worse", "worse"), ("no difference", NO_DIFFERENCE)):
        same_verdict = [gain for gain in found.values() if gain.verdict == verdict]
        if not same_verdict:
            continue
        if verdict == "no difference":
            texts = [gain.metric for gain in same_verdict]
        else:
            texts = [str(gain) for gain in same_verdict]
        clauses.append(f"{words} in {', '.join(texts)}")
    if not clauses:
        return ""
    return f"{name} against {other}: {'; '.join(clauses)}."


def jackknife_values(measure: Callable[[Tensor], float], num_rows: int) -> Tensor:
    """Return a metric of all rows, then of all rows but each of 20 random groups.

    The latter are NaN with fewer than 20 rows.

    Args:
        measure (`Callable`): numbers of rows -> the metric on them.
        num_rows (`int`): how many rows there are.
    """
    all_rows = torch.arange(num_rows)
    if num_rows < GROUPS_LEFT_OUT:
        without = [math.nan] * GROUPS_LEFT_OUT
        return torch.tensor([measure(all_rows), *without], dtype=torch.float64)

    # The same groups for every model, so that two of them can be compared group by group.
    order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(0))
    group_of_row = torch.empty(num_rows, dtype=torch.long)
    group_of_row[order] = torch.arange(num_rows) % GROUPS_LEFT_OUT
    subsets = [(group_of_row != group).nonzero().flatten() for group in range(GROUPS_LEFT_OUT)]
    return torch.tensor([measure(rows) for rows in (all_rows, *subsets)], dtype=torch.float64)


def jackknife_change(before: Tensor, after: Tensor) -> Change:
    """Return the change of a metric, with the delete-a-group jackknife's interval.

    before, after: its `jackknife_values`
    """
    whole, *without = (after - before).tolist()
    if not all(map(math.isfinite, (whole, *without))):
        return Change(whole, -math.inf, math.inf)
    mean = math.fsum(without) / len(without)
    squares = math.fsum((value - mean) ** 2 for value in without)
    variance = (len(without) - 1) / len(without) * squares
    reach = STUDENT_95 * math.sqrt(variance)
    return Change(whole, whole - reach, whole + reach)


def packed_rows(values: Mapping[str, Tensor | Mapping[str, Mapping[str, Tensor]]]) -> dict[str, Any]:
    """Pack the numbers per row that `gains` needs, so that a JSON file stays small.

    Tensors become 32-bit floats in base64.
    """

    def pack(values: Tensor) -> str:
        content = values.float().numpy().astype("<f4").tobytes()
        return base64.b64encode(content).decode()

    return map_leaves(values, pack)


def unpacked_rows(rows: Mapping[str, Any]) -> dict[str, Any]:
    """Unpack what `packed_rows` packed, into float64 tensors (samples,)."""

    def unpack(text: str) -> Tensor:
        content = bytearray(base64.b64decode(text))
        return torch.frombuffer(content, dtype=torch.float32).double()

    return map_leaves(rows, unpack)


def map_leaves(content: Any, function: Callable[[Any], Any]) -> Any:
    """Apply a function to every value in nested dicts and lists."""
    if isinstance(content, Mapping):
        return {name: map_leaves(part, function) for name, part in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [map_leaves(part, function) for part in content]
    return function(content)
