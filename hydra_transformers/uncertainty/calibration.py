"""Fits a decision on validation data, and makes it part of the model."""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..data.batches import check_is_data
from ..data.groups import check_are_groups, groups_of
from ..data.loading import load_if_named
from ..data.prediction import device_of
from ..models.auto import is_hydra_class
from ..models.decision import Decision
from .abstention import Abstention, check_share, check_target
from .calibrated_classifier import CalibratedClassifier
from .calibration_summary import NEVER_ABSTAINS, describe_sets, summarize_abstention
from .class_promises import PREDICTION, ClassAbstention, ClassTarget, is_by_class, summary_of
from .costs import CostTarget, is_cost
from .detectors import Detector
from .monitor import validation_summary
from .task import ColumnGroups, TaskFit, ValidationRows
from .tasks import task_fit_of


LEAST_ROWS = 20  # half of fewer rows fits nothing
DEFAULT_CONFIDENCE = 0.9  # of a risk: "at most 5 % of the answers are wrong" is read as a promise


@dataclass(frozen=True)
class Calibration:
    """The result of `calibrate`. Printed, it says what was fitted on what, and what it promises.

    Attributes:
        model (`nn.Module`): the calibrated model: the Hydra itself, or a `CalibratedClassifier` around another model.
        settings (`dict`): of the decision; which there are depends on the task.
        abstention (`Abstention` or `None`): the threshold, with its effect and promise; None without a target.
        rows (`tuple[int, int]`): of the two halves of the data: the first fitted all but the threshold, the sets and intervals.
        sentences (`list[str]`): what is printed.
        summary (`list[str]`): the same in a line each: what is promised, what is answered.
    """

    model: nn.Module
    settings: dict[str, Any]
    abstention: Abstention | None
    rows: tuple[int, int]
    sentences: list[str]

    @property
    def summary(self) -> list[str]:
        lines = summarize_abstention(self.abstention)
        has_target = self.abstention is not None
        return lines + describe_sets(self.settings["task"], self.settings.get("alpha"), has_target)

    def __str__(self) -> str:
        return "\n".join(self.sentences)


def calibrate(
    model: nn.Module,
    data: Any,
    ood_data: Any = None,
    *,
    target: Mapping[str, Any] | None = None,
    by: str | None = None,
    confidence: float | None = None,
    detector: str | Detector = "msp",
    alpha: float | None = 0.1,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    batch_size: int = 32,
    seed: int = 0,
) -> Calibration:
    """Fits what turns a model's outputs into decisions, and makes it part of the model.

    This describes single-label classification. Other tasks take `data`, `ood_data`, `target`, `confidence` and `alpha`; what
    these mean there, docs/tasks.md says task by task.

    Args:
        model (`nn.Module`):
            A Hydra, which is changed: its config and weights then carry the decision, which applies wherever the model is
            loaded, and it is in eval mode, as it abstains in no other. Or any classifier or baseline, which is left as it is and wrapped.
        data (`DataLoader`, `Dataset`, `DataFrame`, `list` or `str`):
            Labelled validation rows that the model was not trained on, or the name, folder or file of a data set. A random
            half fits the temperature, and the detector if it needs a fit; the other half fits the threshold and the sets,
            whose promises need rows that nothing else was fitted on.
        ood_data (*optional*):
            Out-of-distribution rows, for `target={"tpr": ...}`, or to see how many of them a threshold refuses.
        target (`dict`, *optional*):
            When to abstain, one of {"risk": 0.05} (at most 5 % of the answered rows are wrong), {"coverage": 0.9} (at least
            90 % are answered) and {"tpr": 0.95} (95 % of `ood_data` are refused); None for never. See `Abstention.fit`.
            Single-label models also keep promises by class: {"risk": {"merge": 0.002, "*": 0.015}} (of the rows that are
            answered "merge", and of all others), {"missed": 0.01, "label": "fraud"} (at most 1 % of the true fraud rows are
            answered as another label). {"cost": {"wrong": 20, "review": 1}} sets the threshold of the least expected cost,
            with a bound on the cost, also for multi-label models and rewards; of a single-label model a matrix by label and
            prediction may stand in place of "wrong".
        by (`str`, *optional*):
            "prediction" for a risk that every predicted class of a single-label model keeps, not only their average. Or a
            column of `data` that is known when predicting, such as "site", for one that each of its groups keeps; not for
            regression and tokens. {"risk": {"north": 0.01, "*": 0.05}} names the risk of some. Classes or groups with too few
            rows are pooled with similar ones, and named. All these promises hold together with the confidence.
        confidence (`float`, *optional*, defaults to 0.9 for a risk, to 0 for other targets):
            With 0.9, the target is met on new rows in 90 % of all fits; with 0, on half of `data` and nothing is promised.
        detector (`str` or `Detector`, *optional*, defaults to `"msp"`):
            A name (see `Detector`), or a detector, such as one that was fitted on the training data.
        alpha (`float`, *optional*, defaults to 0.1):
            The share of prediction sets that may miss the right class; None for no sets.
        column (`str` or pair of `str`, *optional*), label (`str`, *optional*):
            The columns of a DataFrame or of a named set, as for `load_data`; by default those that the model was fine-tuned
            on, or found.
        batch_size (`int`, *optional*, defaults to 32):
            Rows per batch, if data comes in rows.
        seed (`int`, *optional*, defaults to 0):
            Of the halves.

    Returns:
        `Calibration`: the calibrated model, and what was fitted in sentences.

    Example:

        calibration = calibrate(hydra, validation, target={"risk": 0.05})
        print(calibration)
        hydra(**inputs).abstain  # (batch,) bool
    """
    inner = model.model if isinstance(model, CalibratedClassifier) else model
    task = task_fit_of(inner)
    task.set_detector(detector)
    data = load_if_named(data, inner, labelled=True, column=column, label=label)
    ood_data = load_if_named(ood_data, inner, labelled=False, column=column)
    groups = None
    if by is not None and by != PREDICTION:
        groups = _read_groups(task, inner, data, by)
    by_class = None
    if groups is None and (by is not None or (isinstance(target, Mapping) and is_by_class(target))):
        by_class = _class_target(task, inner, target, by)
    costs = None
    if groups is None and is_cost(target):
        costs = _cost_target(task, target)
    by_column = None
    if groups is not None:
        names = sorted(set(groups))
        by_column = ClassTarget.by_column(target, names)
    is_other = by_class is not None or by_column is not None or costs is not None
    _check(task, data, ood_data, None if is_other else target, confidence, alpha, is_other)
    if confidence is None and target is not None and {"risk", "missed", "cost"} & set(target) and task.guarantees_risk:
        confidence = DEFAULT_CONFIDENCE
    is_hydra = is_hydra_class(type(inner))
    # An earlier decision is off meanwhile, and stays in place should anything fail.
    with inner.uncalibrated() if is_hydra else nullcontext():
        collected = task.collect_rows(data, batch_size)
        places_of_halves = halves_of(collected.labels, seed)
        halves = [collected.take(places) for places in places_of_halves]
        ood = None if ood_data is None else task.collect_rows(ood_data, batch_size)
        rows = ValidationRows(*halves, ood, target, confidence or None, alpha, by_class, costs)
        if by_column is not None:
            indices = torch.tensor([names.index(group) for group in groups])
            if len(indices) != len(collected.labels):
                raise ValueError(f"data has {len(collected.labels)} rows, and {len(indices)} of the column {by!r}")
            first, second = (indices[places] for places in places_of_halves)
            rows = replace(rows, by_column=ColumnGroups(by_column, by, names, first, second))
        fitted = task.fit(rows)
    sentences = fitted.sentences if fitted.abstention is not None else [*fitted.sentences, NEVER_ABSTAINS]
    settings = fitted.settings | {"sentences": sentences}
    if fitted.abstention is not None:
        threshold = fitted.abstention.threshold
        settings["threshold"] = threshold if math.isfinite(threshold) else str(threshold)  # JSON has no infinity
    decision = task.decision(settings, fitted.state)
    by_group = summary_of(fitted.abstention) if isinstance(fitted.abstention, ClassAbstention) else {}
    if by_group:  # before the outcomes are counted, which it says how
        decision.settings = replace(decision.settings, validation=by_group)
    decision.settings = replace(decision.settings, validation=_summary(task, decision, rows) | by_group)
    decision.to(device_of(inner))
    decision.remember(inner)
    if is_hydra:
        inner.eval().decision = decision.eval()
        inner.config.decision = decision.settings.to_dict()
    result = inner if is_hydra else CalibratedClassifier(inner, decision)
    return Calibration(result, decision.settings.to_dict(), fitted.abstention, rows.counts, sentences)


def _summary(task: TaskFit, decision: Decision, rows: ValidationRows) -> dict[str, Any]:
    """What a `Monitor` later compares with."""
    random = torch.Generator().manual_seed(0)
    target = rows.target or {}
    groups = (None, None)
    if rows.by_column is not None:
        groups = (rows.by_column.first, rows.by_column.second)
    outcomes = [
        task.outcomes(decision(half.answers, half.features, group), half.labels, decision.settings, random)
        for half, group in zip((rows.first, rows.second), groups, strict=True)
    ]
    risk = target.get("risk") if task.guarantees_risk else None
    if isinstance(risk, Mapping):
        risk = max(risk.values())  # if each label keeps its own, all together keep the highest
    return validation_summary(outcomes[1], outcomes[0].scores, risk)


def _class_target(task: TaskFit, model: nn.Module, target: Any, by: str | None) -> ClassTarget | None:
    """Read a target by class; raise for models that cannot keep one."""
    if not task.has_detector:
        raise ValueError(
            f"by, and risks of labels, are for single-label classification, this is {task.title}: leave them out"
        )
    _check_code(model)
    return ClassTarget.of(target, by, task.classes)


def _read_groups(task: TaskFit, model: nn.Module, data: Any, column: str) -> list[str]:
    """Return the group of each row; raise for models whose promises cannot be made by groups."""
    if not isinstance(column, str):
        raise TypeError(f"by is a {type(column).__name__}: pass 'prediction', or the name of a column")
    if not task.judges_rows:
        raise ValueError(f"by is for rows that are right or wrong as a whole, this is {task.title}: leave it out")
    _check_code(model)
    groups = groups_of(data, column)
    check_are_groups(groups, column)
    return groups


def _check_code(model: nn.Module) -> None:
    """Raise for a Hydra whose code may be of a version that knows no promises by group."""
    is_hydra = is_hydra_class(type(model))
    if is_hydra and not type(model).__module__.startswith(__package__.partition(".")[0]):
        raise ValueError(
            "model runs the code in its folder, which may know of no promise by class: import hydra_transformers before it is loaded"
        )


def _cost_target(task: TaskFit, target: Mapping[str, Any]) -> CostTarget:
    """Read a target of costs; raise for models whose answers are not right or wrong as a whole."""
    if not task.judges_rows:
        raise ValueError(
            f"a cost is for rows that are right or wrong as a whole, this is {task.title}: pass a coverage, for example"
        )
    prices = target["cost"]
    if isinstance(prices, Mapping) and "matrix" in prices and not task.has_detector:
        raise ValueError(
            f"a matrix is for single-label classification, this is {task.title}: pass {{'wrong': 20, 'review': 1}}"
        )
    return CostTarget.of(target, None if task.classes is None else len(task.classes))


def _check(
    task: TaskFit,
    data: Any,
    ood_data: Any,
    target: Any,
    confidence: float | None,
    alpha: float | None,
    is_other: bool = False,
) -> None:
    """Raises an error for what cannot be fitted, or would have no effect, before anything is predicted."""
    if target is not None:
        check_target(target, is_share=task.guarantees_risk)
        if "tpr" in target and ood_data is None:
            raise ValueError("ood_data is missing: a tpr is the share of out-of-distribution rows that is refused")
    if is_other and ood_data is not None:
        raise ValueError("ood_data has no effect on promises by class, and on costs: leave it out")
    for name, value in {"confidence": confidence, "ood_data": ood_data}.items():
        if target is None and not is_other and value is not None:
            raise ValueError(f"{name} has no effect without a target: pass one, such as {{'risk': 0.05}}")
    for name, value in {"confidence": confidence or None, "alpha": alpha}.items():
        if value is not None:
            check_share(value, name)
    for name, value in {"data": data, "ood_data": ood_data}.items():
        if value is not None:
            check_is_data(value, name)


def halves_of(labels: Tensor | None, seed: int) -> tuple[Tensor, Tensor]:
    """Return the places of the rows of two random halves."""
    if labels is None:
        raise ValueError("data has no labels: calibrate on labelled rows, add a column labels")
    if len(labels) < LEAST_ROWS:
        raise ValueError(f"data has {len(labels)} rows: pass at least {LEAST_ROWS}, better 1,000")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return order[: len(order) // 2], order[len(order) // 2 :]
