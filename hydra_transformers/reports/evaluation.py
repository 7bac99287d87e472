"""Evaluates models in and out of distribution, and reports the results."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .._io.processes import check_can_be_shared, gather_batches, rank_and_world_size
from ..data.batches import ChangedBatches, batches, split_labels
from ..data.loading import load_if_named, ood_groups
from ..data.zero_shot import ZeroShotClassifier
from ..models.decision import Decision
from ..uncertainty.detectors import Detector, as_detector, ood_score
from ..uncertainty.features import AnswerReader, without_decision
from ..uncertainty.metrics import exact_mean, ood_metrics
from ..uncertainty.rewards import RewardTask
from ..uncertainty.task import Rows, Task
from ..uncertainty.tasks import task_of
from .curves import reliability_curve, risk_curve, roc_curve, score_histograms
from .gains import jackknife_values, packed_rows
from .report import CORRUPTION, ID, Metrics, Report
from .table import DATA


ENERGY = "energy"  # shown beside any other score: it needs no fit, and is often better than the maximum probability


def evaluate_uncertainty(
    models: nn.Module | Mapping[str, nn.Module],
    data: Any,
    ood_data: Any = None,
    *,
    score: str | Detector = "msp",
    corruptions: Mapping[str, Mapping[Any, Any]] | None = None,
    class_prompts: Mapping[str, Tensor] | None = None,
    batch_size: int = 32,
) -> Report:
    """Evaluates models of any task in and out of distribution. Each predicts on its own device.

    What a calibrated model decides is measured, too: how much it answers, and how much of that is wrong.

    Args:
        models (`nn.Module` or `Mapping[str, nn.Module]`): a Hydra, a Hugging Face classifier or a baseline; or several of one
            task, `{name: model}`.
        data (`DataLoader`, `Dataset` or `list`): labelled data: a DataLoader, a list of dict batches, a Dataset or list of
            dict rows; or the name, folder or file of a data set, which `load_data` reads for the first model, as with
            `ood_data`. For reward models `{"chosen": data, "rejected": data}`, or texts in columns of these names.
        ood_data (*optional*): `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, or one data set.
        score (`str` or `Detector`, defaults to `"msp"`): the OOD score of single-label models: a name, see `ood_score`, or a
            `Detector`. A fitted detector belongs to one model: evaluate each by itself, and join the reports (`joined`).
        corruptions (*optional*): labelled data under shift, `{corruption: {severity: data}}`, such as the result of
            `hydra_transformers.shift.corrupted_sets`.
        class_prompts (*optional*): for CLIP and SigLIP, the tokenizer's output with one prompt per class.
        batch_size (`int`, defaults to 32): rows per batch, where data comes in rows.

    Returns:
        `Report`: the metrics of each model on each data set. With `torch.distributed` initialised, the processes share the
        batches of single-label models: give every process the whole data in the same order; all get the same report.

    Example:
        >>> print(evaluate_uncertainty({"One": backbone, "Hydra": hydra}, test, {"noise": noise}))  # doctest: +SKIP
    """
    models = dict(models) if isinstance(models, Mapping) else {type(models).__name__: models}
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} is not a model: pass one model, or several as {{name: model}}")
    if not models:
        raise ValueError("models is empty: pass at least one model")
    tasks = _tasks(models, data)
    task, first = next(iter(tasks.values())), next(iter(models.values()))
    if not task.has_detector and (score != "msp" or class_prompts is not None):
        raise ValueError(f"score and class_prompts are for single-label models, not for {task.title}: leave them out")
    data = task.load(data, first)
    ood_data = load_if_named(ood_data, first, **({"labelled": False} if task.has_detector else {}))
    data_sets, groups = _data_sets(data, ood_data, corruptions or {})
    for place, data_set in data_sets.items():
        data_set = data_set.data if isinstance(data_set, ChangedBatches) else data_set
        if (len(models) > 1 or corruptions) and hasattr(data_set, "__next__"):
            raise TypeError(f"{place} is an iterator, which can be read once: pass a list, a Dataset or a DataLoader")
        if task.has_detector:
            check_can_be_shared(data_set, place)
    detector = as_detector(score)
    if detector.needs_fit and len(models) > 1:
        raise ValueError(f"score is {detector.name}, fitted on one model: evaluate each by itself and join reports")
    readings = {}
    for name, model in models.items():
        model = ZeroShotClassifier(model, class_prompts) if class_prompts is not None else model
        model, decision = without_decision(model)
        reader = _Reader(tasks[name], model, decision, detector, batch_size)
        readings[name] = {
            place: reader.measure(place, data_set, labelled=groups[place][0] in (ID, CORRUPTION))
            for place, data_set in data_sets.items()
        }
        _warn_of_useless_results(name, task, readings[name], groups)
    described = detector.description if task.has_detector else "uncertainty of the prediction"
    num_members = {name: measured[DATA].num_members for name, measured in readings.items()}
    results = {name: _results(measured, groups) for name, measured in readings.items()}
    metrics, curves, rows = ({name: parts[place] for name, parts in results.items()} for place in range(3))
    return Report(task.name, metrics, described, groups, num_members, curves, rows)


def _tasks(models: Mapping[str, nn.Module], data: Any) -> dict[str, Task]:
    """The models' task, which must be one."""
    tasks = {name: task_of(model) for name, model in models.items()}
    names = {task.name for task in tasks.values()}
    are_pairs = isinstance(data, Mapping) and set(data) == {"chosen", "rejected"}
    # A plain model of one output has no aggregate.
    if all(task.predicts_numbers for task in tasks.values()) and (are_pairs or len(names) > 1):
        tasks = {name: RewardTask(model) for name, model in models.items()}
    first = next(iter(tasks.values()))
    for name, task in tasks.items():
        if task.name != first.name:
            raise ValueError(f"{name} is for {task.title}, the first for {first.title}: compare models of one task")
    return tasks


def _data_sets(
    data: Any, ood_data: Any, corruptions: Mapping[str, Mapping[Any, Any]]
) -> tuple[dict[str, Any], dict[str, tuple[str, str, str]]]:
    """The data sets by their names in the report, and their groups, see `Report.groups`."""
    if not isinstance(corruptions, Mapping) or not all(isinstance(sweep, Mapping) for sweep in corruptions.values()):
        raise TypeError("corruptions is not {corruption: {severity: data}}: pass corrupted_sets(data, names)")
    named = [(DATA, data, (ID, DATA, ""))]
    for group, sets in ({} if isinstance(ood_data, Mapping) and not ood_data else ood_groups(ood_data)).items():
        if group in (ID, CORRUPTION):
            raise ValueError(f"ood_data has a group called {group!r}, as the report calls others: rename it")
        for name, rows in sets.items():
            named.append((name if group == "OOD" else f"{name} ({group})", rows, (group, name, "")))
    for corruption, sweep in corruptions.items():
        for severity, rows in sweep.items():
            named.append((f"{corruption}, severity {severity}", rows, (CORRUPTION, corruption, str(severity))))
    data_sets, groups = {title: rows for title, rows, _ in named}, {title: group for title, _, group in named}
    if len(data_sets) < len(named):
        raise ValueError(f"two data sets have one name ({', '.join(title for title, *_ in named)}): rename one")
    return data_sets, groups


# One model on one data set


@dataclass
class _Measured:
    """
    metrics: of the task
    scores: (rows,), higher is less sure
    num_members: of the model
    constant: the first metric of always predicting the same
    values: per row what intervals and curves need; energies: a second score
    """

    metrics: Metrics
    scores: Tensor
    num_members: int
    constant: float | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    energies: Tensor | None = None


@dataclass(frozen=True)
class _Reader:
    """Measures one model; `decision` is its own, which `model` does not apply, `score` that of single-label models."""

    task: Task
    model: nn.Module
    decision: Decision | None
    score: Detector
    batch_size: int

    def measure(self, place: str, data: Any, labelled: bool) -> _Measured:
        if self.task.has_detector:
            return self._measure_by_batch(place, data, labelled)
        answers, labels = self.task.collect(self.model, data, self.batch_size)
        if labelled and labels is None:
            raise ValueError(f"{place} has no labels: add a column labels")

        def metrics_of(rows: Any) -> Metrics:
            decided = None if self.decision is None else self.task.decide(self.decision, answers[rows])
            return self.task.measure(answers[rows], None if labels is None else labels[rows], decided)

        metrics, values = metrics_of(slice(None)) | {"num_samples": len(answers)}, {}
        if labelled and place == DATA:
            first = next(iter(self.task.metrics))
            values["first_metric"] = jackknife_values(lambda rows: metrics_of(rows).get(first, math.nan), len(answers))
        constant = self.task.constant_metric(labels) if labelled else None
        return _Measured(metrics, self.task.scores(answers), answers[:1].shape[1], constant, values)

    def _measure_by_batch(self, place: str, data: Any, labelled: bool) -> _Measured:
        """Of single-label models: no logits are kept, and processes share the batches."""
        reads_features = self.score.reads_features or bool(self.decision and self.decision.reads_features)
        reader, parts = AnswerReader(self.model, reads_features), []
        for batch in batches(data, self.batch_size, reader.device, *rank_and_world_size()):
            member_logits, features = reader(batch)
            labels = split_labels(batch)[1] if labelled else None
            if labelled and labels is None:
                raise ValueError(f"{place} has no labels: add a column labels (or label) with class indices")
            decided = None if self.decision is None else self.decision(member_logits, features)
            values = self.task.row_values(Rows(member_logits, labels, features), decided, self.score)
            values["energy"] = ood_score(member_logits if decided is None else decided.member_logits, ENERGY).cpu()
            values |= {} if labels is None else {"label": labels.cpu()}
            parts.append((values, member_logits.shape[1]))
        parts = gather_batches(parts)
        if not parts:
            raise ValueError(f"{place} is empty: pass at least one sample")
        values = {name: torch.cat([part[name] for part, _ in parts]) for name in parts[0][0]}
        threshold = None if self.decision is None else self.decision.settings["threshold"]
        if threshold is None:
            values.pop("answered", None)
        metrics = self.task.summarize(values) | {name: exact_mean(values[name]) for name in ("total", "aleatoric")}
        metrics["num_samples"], most_frequent = len(values["score"]), None
        if labelled:
            metrics |= {} if threshold is None else {"threshold": float(threshold)}
            most_frequent = float(values["label"].bincount().max()) / len(values["score"])
        energies = None if self.score.name == ENERGY else values["energy"]
        return _Measured(metrics, values["score"], parts[0][1], most_frequent, values, energies)


# All data sets of one model


def _results(measured: Mapping[str, _Measured], groups: Mapping) -> tuple[dict[str, Metrics], dict, dict]:
    """The `models`, `curves` and `rows` of a report for one model: with how well the score tells OOD and corrupted data."""
    known, by_group = measured[DATA], {}
    ood = {place: data_set.scores for place, data_set in measured.items() if groups[place][0] not in (ID, CORRUPTION)}
    metrics = {place: dict(data_set.metrics) for place, data_set in measured.items()}
    for place, data_set in measured.items():
        group, name, _ = groups[place]
        if place in ood:
            by_group.setdefault(group, {})[name] = data_set.scores
            metrics[place] |= ood_metrics(known.scores, data_set.scores)
            if data_set.energies is not None:
                metrics[place]["energy_auroc"] = ood_metrics(known.energies, data_set.energies)["auroc"]
        elif group == CORRUPTION:
            metrics[place]["shift_auroc"] = ood_metrics(known.scores, data_set.scores)["auroc"]
            aurocs = [ood_metrics(data_set.scores, scores)["auroc"] for scores in ood.values()]
            metrics[place] |= {"ood_auroc": math.fsum(aurocs) / len(aurocs)} if aurocs else {}
    curves = {"roc": {name: roc_curve(known.scores, scores) for name, scores in ood.items()}}
    curves["histograms"] = score_histograms(known.scores, ood)
    if "correct" in known.values:
        rows = known.values["confidence"], known.values["correct"]
        curves |= {"reliability": reliability_curve(*rows), "risk_coverage": risk_curve(*rows)}
    kept = {name: known.values[name] for name in ("correct", "nll", "first_metric") if name in known.values}
    return metrics, curves, packed_rows(kept | {"score": known.scores, "ood": by_group})


def _warn_of_useless_results(name: str, task: Task, measured: Mapping[str, _Measured], groups: Mapping) -> None:
    """Warns of a model that learned nothing, and of OOD data that is the data."""
    known, (metric, (title, better)) = measured[DATA], next(iter(task.metrics.items()))
    value, constant = known.metrics.get(metric), known.constant
    is_useless = None not in (value, constant) and (value <= constant if better == "high" else value >= constant)
    if constant == 1.0:
        warnings.warn("all labels of data are of one class: the metrics say nothing of the others", stacklevel=3)
    elif is_useless:
        warnings.warn(
            f"{name} is no better than always predicting the same ({title} {value:.4g}; the most frequent class, or the mean, "
            f"has {constant:.4g}): it has learned nothing about these data",
            stacklevel=3,
        )
    for place, data_set in measured.items():
        mine, theirs = (side.values.get("confidence", side.scores).sort().values for side in (known, data_set))
        if groups[place][0] not in (ID, CORRUPTION) and torch.equal(mine, theirs):
            warnings.warn(f"{name} predicts {place} exactly as data: are they the same data?", stacklevel=3)
