"""Promises for each group of rows, or for the true rows of one class, in place of one for all rows on average.

A group is a predicted class, or a value of a column that is known when predicting. A row is answered if its score is at most the
threshold of its group. All promises of a calibration hold together with the confidence: each of G groups gets a share 1 / G of what
may go wrong.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .abstention import SHIFT, Abstention, check_share, just_below


OTHERS = "*"  # in a target: all classes that it does not name
SHOWN = 4  # class names of a group, in sentences
PREDICTION = "prediction"  # the `by` that is no column


def is_by_class(target: Mapping[str, Any]) -> bool:
    """Whether a target is about the rows of some labels."""
    return bool({"missed", "label"} & target.keys()) or isinstance(target.get("risk"), Mapping)


@dataclass(frozen=True)
class ClassTarget:
    """What is to be promised, by class.

    risks: the risk of each group of classes; None for "missed"
    groups: the classes of each, or None where calibration pools classes that have too few rows
    pools_last: whether the last group is all others, each of which keeps its risk, with pools of those with too few rows
    missed, label: at most this share of the true rows of a class is answered as another
    """

    risks: tuple[float, ...] = ()
    groups: tuple[tuple[int, ...], ...] | None = None
    pools_last: bool = False
    missed: float | None = None
    label: int | None = None

    @classmethod
    def of(cls, target: Any, by: str | None, classes: Sequence[str] | None) -> "ClassTarget | None":
        """Read the `target` and `by` of `calibrate`; None for a target of all rows together.

        Args:
            target (`dict`, *optional*): {"risk": share}, {"risk": {label: share}} or {"missed": share, "label": label}.
            by (`str`, *optional*): "prediction" for a risk that every predicted class keeps.
            classes (`list[str]`, *optional*): the names of the model's classes.
        """
        if by not in (None, PREDICTION):
            raise ValueError(f"by is {by!r}: pass {PREDICTION!r}, for a risk that every predicted class keeps")
        risk = target.get("risk") if isinstance(target, Mapping) else None
        if by is not None and not isinstance(risk, Mapping):
            return cls._by_prediction(target, risk)
        if target is None or not is_by_class(target):
            return None
        if isinstance(risk, Mapping):
            return cls._by_label(target, risk, by, classes)
        if set(target) != {"missed", "label"} or by is not None:
            raise ValueError(f"target is {target!r}: pass {{'missed': 0.01, 'label': 'fraud'}} by itself")
        return cls(missed=check_share(target["missed"], "missed"), label=_place_of(target["label"], classes))

    @classmethod
    def by_column(cls, target: Any, names: Sequence[str]) -> "ClassTarget":
        """Read the `target` of `calibrate` where `by` is a column: {"risk": share} or {"risk": {name: share, "*": share}}.

        Args:
            target (`dict`): the target.
            names (`list[str]`): of the column's groups.
        """
        risk = target.get("risk") if isinstance(target, Mapping) else None
        if not isinstance(risk, Mapping):
            return cls._by_prediction(target, risk)
        found = cls._by_label(target, risk, None, names, "group")
        named = {name for name in risk if name != OTHERS}
        return replace(found, pools_last=len(named) < len(names))

    @classmethod
    def _by_prediction(cls, target: Any, risk: Any) -> "ClassTarget":
        if risk is None or len(target) != 1:
            raise ValueError(f"by is for a risk, and target is {target!r}: pass {{'risk': 0.05}}")
        return cls(risks=(check_share(risk, "risk"),))

    @classmethod
    def _by_label(
        cls,
        target: Mapping[str, Any],
        risks: Mapping[str, float],
        by: str | None,
        classes: Sequence[str] | None,
        kind: str = "label",
    ) -> "ClassTarget":
        """kind: what is named, in messages"""
        if by is not None or len(target) != 1 or not risks:
            raise ValueError(
                f"target is {target!r}: pass {{'risk': {{'merge': 0.002, '*': 0.015}}}} by itself, without by"
            )
        groups = [(_place_of(label, classes, kind),) for label in risks if label != OTHERS]
        values = [check_share(risk, f"risk of {label!r}") for label, risk in risks.items() if label != OTHERS]
        named = {place for group in groups for place in group}
        rest = tuple(place for place in range(len(classes or ())) if place not in named)
        if rest and OTHERS not in risks:
            raise ValueError(
                f"target names no risk of the other {kind}s: add '{OTHERS}', such as {{'merge': 0.002, '*': 0.015}}"
            )
        if rest:
            groups.append(rest)
            values.append(check_share(risks[OTHERS], f"risk of {OTHERS!r}"))
        return cls(risks=tuple(values), groups=tuple(groups))


@dataclass(frozen=True)
class ClassPromise:
    """What is promised of the rows with some predictions.

    name, classes: of the predictions
    risk: at most this share of their answers is wrong; None where nothing is promised of them
    threshold: up to which score they are answered; -inf where nothing can be promised
    rows, answered, wrong: of the fitting rows with these predictions: all, those that are answered, and those of them that are wrong
    """

    name: str
    classes: tuple[int, ...]
    risk: float | None
    threshold: float
    rows: int
    answered: int
    wrong: int


@dataclass(frozen=True)
class ClassAbstention(Abstention):
    """An `Abstention` with a threshold for each group of rows; its own `threshold` is the highest.

    Attributes:
        groups (`tuple[ClassPromise, ...]`): by predicted class or classes, or by value or values of a column.
        column (`str` or `None`): whose values name the groups; None where they are predicted classes.
        label (`str`), label_rows (`int`), missed (`int`): of a promise of the true rows of one class: its name, how many of the
            fitting rows are of it, and how many of them are answered as another.
        names (`tuple[str, ...]`): of all classes, or of all values of the column.
    """

    groups: tuple[ClassPromise, ...] = ()
    names: tuple[str, ...] = ()
    column: str | None = None
    label: str = ""
    label_rows: int = 0
    missed: int = 0

    def thresholds(self, num_classes: int) -> list[float]:
        """Return the threshold of each class."""
        values = [-math.inf] * num_classes
        for group in self.groups:
            for place in group.classes:
                values[place] = group.threshold
        return values

    @property
    def guarantee(self) -> str:
        if self.confidence is None:
            return f"No guarantee: the targets hold on the fitting rows, new rows may miss them. {SHIFT}"
        condition = (
            f"if new rows are independent and of the same distribution as the {self.rows} fitting rows. {SHIFT}"
        )
        confidence = f"With {100 * self.confidence:.6g} % confidence"
        if self.target == "missed":
            return f"{confidence} at most {100 * self.value:.6g} % of the true {self.label} rows are answered as another label, {condition}"
        groups = "groups of predictions" if self.column is None else f"groups by {self.column}"
        return f"{confidence} for all {groups} together, at most the named share of the answers of each is wrong, {condition}"

    @property
    def sentence(self) -> str:
        lines = [f"Of the {self.rows:,} fitting rows, {100 * self.coverage:.3g} % are answered. {self.guarantee}"]
        if self.target == "missed":
            lines.append(
                f"  {self.missed:,} of the {self.label_rows:,} fitting rows of {self.label} are answered as another label."
            )
            return "\n".join(lines)
        for group in self.groups:
            share = "never answered: too few rows, or too many errors, to promise"
            if group.answered:
                share = f"{100 * group.answered / group.rows:.3g} % of {group.rows:,} rows answered, {group.wrong:,} wrong; at most"
            lines.append(f"  {group.name}: {share} {100 * group.risk:.3g} %")
        return "\n".join(lines)


def fit_class_abstention(
    target: ClassTarget,
    confidence: float | None,
    scores: Tensor,
    predictions: Tensor,
    labels: Tensor,
    first_predictions: Tensor,
    first_labels: Tensor,
    classes: Sequence[str],
) -> ClassAbstention:
    """Find the threshold of each predicted class.

    Args:
        target (`ClassTarget`), confidence (`float`, *optional*): the promises, and how sure they are together.
        scores, predictions, labels: (rows,), of the rows that make the promises.
        first_predictions, first_labels: of other rows, by which classes with too few rows are pooled.
        classes (`list[str]`): names.
    """
    if target.missed is not None:
        return _fit_missed(target, confidence, scores, predictions, labels, classes)
    return fit_group_abstention(
        target,
        confidence,
        GroupedRows(scores, predictions, predictions == labels),
        GroupedRows(None, first_predictions, first_predictions == first_labels),
        classes,
    )


class GroupedRows(NamedTuple):
    """Rows with their groups, (rows,) each.

    scores: by which they are answered; None where they are not read
    groups: their indices
    correct: bool, whether they are right
    """

    scores: Tensor | None
    groups: Tensor
    correct: Tensor


def fit_group_abstention(
    target: ClassTarget,
    confidence: float | None,
    rows: GroupedRows,
    first: GroupedRows,
    names: Sequence[str],
    column: str | None = None,
) -> ClassAbstention:
    """Find the threshold of each group.

    Args:
        target (`ClassTarget`), confidence (`float`, *optional*): the promises, and how sure they are together.
        rows (`GroupedRows`): that make the promises.
        first (`GroupedRows`): others, by which groups with too few rows are pooled.
        names (`list[str]`): of the groups.
        column (`str`, *optional*): that names them; None where they are predicted classes.
    """
    target = _with_pools(target, confidence, first, len(names))
    risks = target.risks
    promises = fit_groups(target.groups, risks, confidence, rows.scores, rows.groups, rows.correct, names)
    if not any(promise.answered for promise in promises):
        by = "class" if column is None else column
        raise ValueError(
            f"no risk can be promised by {by} on these {len(rows.scores)} rows: pass more rows, a higher risk, or a lower confidence "
            "(0 for none)"
        )
    answered = _are_answered(promises, rows.scores, rows.groups)
    shares = _shares(answered, ~rows.correct)
    highest = max(promise.threshold for promise in promises)
    return ClassAbstention(
        highest,
        "risk",
        max(risks),
        confidence,
        len(rows.scores),
        0,
        **shares,
        groups=tuple(promises),
        names=tuple(map(str, names)),
        column=column,
    )


def _with_pools(target: ClassTarget, confidence: float | None, first: GroupedRows, count: int) -> ClassTarget:
    """Return a target whose groups are settled: those with too few rows are pooled with similar ones.

    count: of the groups that there are
    """
    if target.groups is None:
        named: tuple[tuple[int, ...], ...] = ()
        rest = tuple(range(count))
    elif target.pools_last:
        *named, rest = target.groups
    else:
        return target
    is_in_rest = torch.isin(first.groups, torch.tensor(rest))
    places = torch.searchsorted(torch.tensor(rest), first.groups[is_in_rest])
    pools = pool_classes(places, ~first.correct[is_in_rest], len(rest), target.risks[-1], confidence)
    groups = (*named, *(tuple(rest[place] for place in pool) for pool in pools))
    risks = target.risks[:-1] + (target.risks[-1],) * len(pools)
    return ClassTarget(risks=risks, groups=groups)


def fit_groups(
    groups: Sequence[Sequence[int]],
    risks: Sequence[float],
    confidence: float | None,
    scores: Tensor,
    predictions: Tensor,
    correct: Tensor,
    classes: Sequence[str],
) -> list[ClassPromise]:
    """Return a promise for each group of predicted classes, all of which hold together with the confidence."""
    each = None if confidence is None else 1 - (1 - confidence) / len(groups)
    promises = []
    for members, risk in zip(groups, risks, strict=True):
        is_in_group = torch.isin(predictions, torch.tensor(members))
        threshold = -math.inf
        if is_in_group.any():
            try:
                fitted = Abstention.fit(
                    scores[is_in_group], correct[is_in_group], risk=risk, confidence=each, others=scores
                )
                threshold = fitted.threshold
            except ValueError:  # nothing can be promised: no such row is answered
                pass
        is_answered = is_in_group & (scores <= threshold)
        counts = (int(is_in_group.sum()), int(is_answered.sum()), int((is_answered & ~correct).sum()))
        promises.append(ClassPromise(_name_of(members, classes), tuple(members), risk, threshold, *counts))
    return promises


def pool_classes(
    predictions: Tensor, wrong: Tensor, num_classes: int, risk: float, confidence: float | None
) -> tuple[tuple[int, ...], ...]:
    """Group classes so that each group has rows enough for a promise: a class by itself where it has, others with those of similar
    error rates.

    Rows that make the promises must not be among these: which classes are pooled would depend on their errors.

    Args:
        predictions, wrong: (rows,), of about as many rows as make the promises.
        num_classes (`int`), risk (`float`), confidence (`float`, *optional*): of the promise.
    """
    counts = torch.bincount(predictions, minlength=num_classes).double()
    errors = torch.bincount(predictions[wrong], minlength=num_classes).double()
    least, alone = 1.0, counts >= 1
    for _ in range(20):  # the fewer groups, the fewer rows each needs
        num_groups = int(alone.sum()) + 1
        chance = 0.5 if confidence is None else (1 - confidence) / num_groups
        least = 2 * math.log(chance) / math.log1p(-risk)  # twice as many as without any error
        now = counts >= least
        if torch.equal(now, alone):
            break
        alone = now
    groups = [(place,) for place in range(num_classes) if alone[place]]
    rare = [place for place in range(num_classes) if not alone[place]]
    mean_rate = float(errors.sum() / counts.sum().clamp(min=1))
    rates = (errors + mean_rate) / (counts + 1)
    pools: list[list[int]] = []
    rows = least
    for place in sorted(rare, key=lambda place: float(rates[place])):
        if rows >= least:
            pools.append([])
            rows = 0.0
        pools[-1].append(place)
        rows += float(counts[place])
    if len(pools) > 1 and rows < least:  # the last has too few
        last = pools.pop()
        pools[-1] += last
    return tuple(groups + [tuple(sorted(pool)) for pool in pools])


def _fit_missed(
    target: ClassTarget,
    confidence: float | None,
    scores: Tensor,
    predictions: Tensor,
    labels: Tensor,
    classes: Sequence[str],
) -> ClassAbstention:
    """A threshold for all predictions but one, up to which few true rows of that one are answered as another.

    Which share of the true rows is lost grows with the threshold, so that its k-th lowest score is a bound as in `Abstention.fit`.
    """
    label = target.label
    is_true = labels == label
    is_wrong = is_true & (predictions != label)
    rows = int(is_true.sum())
    name = classes[label]
    if rows == 0:
        raise ValueError(f"data has no rows of {name!r}: pass rows of it")
    allowed = lost_rows_allowed(rows, target.missed, confidence)
    if allowed is None:
        needed = math.ceil(math.log1p(-confidence) / math.log1p(-target.missed))
        raise ValueError(
            f"missed={target.missed:g} cannot be guaranteed with {100 * confidence:.6g} % confidence on {rows} rows of {name!r} (half of "
            f"those in data): pass at least {needed}, or ask for less"
        )
    lost_scores = scores[is_wrong].sort().values
    threshold = math.inf
    if len(lost_scores) > allowed:
        dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
        threshold = just_below(float(lost_scores[allowed]), scores, dtype)  # that row is not answered
    others = tuple(place for place in range(len(classes)) if place != label)
    promises = [
        _plain_promise((label,), math.inf, scores, predictions, labels, classes),
        _plain_promise(others, threshold, scores, predictions, labels, classes),
    ]
    answered = _are_answered(promises, scores, predictions)
    shares = _shares(answered, predictions != labels)
    return ClassAbstention(
        math.inf,
        "missed",
        target.missed,
        confidence,
        len(scores),
        0,
        **shares,
        groups=tuple(promises),
        names=tuple(map(str, classes)),
        label=name,
        label_rows=rows,
        missed=int((is_wrong & answered).sum()),
    )


def lost_rows_allowed(rows: int, share: float, confidence: float | None) -> int | None:
    """Return how many of so many true rows may be answered as another label; None where not even none is enough of a proof.

    With the threshold strictly below the k-th lowest score of the lost rows, the true share is distributed as Beta(k, n + 1 - k), or
    is lower: k is the largest for which it is at most `share` with the confidence.
    """
    from scipy.special import bdtr

    if confidence is None:
        return math.floor(share * rows + 1e-9)
    allowed = int(np.searchsorted(bdtr(np.arange(rows), rows, share), 1 - confidence, side="right"))
    return allowed - 1 if allowed else None


def _plain_promise(
    members: Sequence[int],
    threshold: float,
    scores: Tensor,
    predictions: Tensor,
    labels: Tensor,
    classes: Sequence[str],
) -> ClassPromise:
    is_in_group = torch.isin(predictions, torch.tensor(members))
    is_answered = is_in_group & (scores <= threshold)
    wrong = int((is_answered & (predictions != labels)).sum())
    return ClassPromise(
        _name_of(members, classes),
        tuple(members),
        None,
        threshold,
        int(is_in_group.sum()),
        int(is_answered.sum()),
        wrong,
    )


def _are_answered(promises: Sequence[ClassPromise], scores: Tensor, predictions: Tensor) -> Tensor:
    answered = torch.zeros(len(scores), dtype=torch.bool)
    for promise in promises:
        answered |= torch.isin(predictions, torch.tensor(promise.classes)) & (scores <= promise.threshold)
    return answered


def _shares(answered: Tensor, wrong: Tensor) -> dict[str, Any]:
    coverage = float(answered.double().mean())
    risk = float(wrong[answered].double().mean()) if answered.any() else None
    without = float(wrong.double().mean())
    return {"coverage": coverage, "risk": risk, "risk_without": without, "fpr": 1 - coverage, "tpr": None}


def _place_of(label: Any, classes: Sequence[str] | None, kind: str = "label") -> int:
    names = [str(name) for name in classes or ()]
    if str(label) not in names:
        known = ", ".join(names[:10]) or "none that have names"
        whose = "the model's labels" if kind == "label" else "those of the data"
        raise ValueError(f"target names the {kind} {label!r}, and {whose} are {known}")
    return names.index(str(label))


def _name_of(members: Sequence[int], classes: Sequence[str]) -> str:
    names = [str(classes[place]) for place in members]
    if len(names) <= SHOWN:
        return ", ".join(names)
    return f"{', '.join(names[:SHOWN])} and {len(names) - SHOWN} more"


def with_settings(abstention: ClassAbstention, num_classes: int) -> dict[str, Any]:
    """Return the settings of a decision that these thresholds need.

    num_classes: of the model
    """
    if abstention.column is None:
        return {"thresholds": [_saved(value) for value in abstention.thresholds(num_classes)]}
    thresholds = [_saved(value) for value in abstention.thresholds(len(abstention.names))]
    return {"by_group": {"column": abstention.column, "names": list(abstention.names), "thresholds": thresholds}}


def summary_of(abstention: ClassAbstention) -> dict[str, Any]:
    """Return what a monitor compares with later: each promise and how it did on the fitting rows."""
    groups = [
        {
            "name": group.name,
            "classes": list(group.classes),
            "risk": group.risk,
            "threshold": _saved(group.threshold),
            "wrong": [group.wrong, group.answered],
        }
        for group in abstention.groups
    ]
    summary: dict[str, Any] = {"groups": groups, "names": list(abstention.names)}
    if abstention.column is not None:
        summary["column"] = abstention.column
    if abstention.target == "missed":
        label = next(group.classes[0] for group in abstention.groups if group.name == abstention.label)
        lost = [abstention.missed, abstention.label_rows]
        summary["lost"] = {"name": abstention.label, "label": label, "share": abstention.value, "rows": lost}
    return summary


def _saved(value: float) -> float | str:
    """A threshold as JSON has it, which has no infinity."""
    return value if math.isfinite(value) else str(value)
