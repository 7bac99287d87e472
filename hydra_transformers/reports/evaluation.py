"""Evaluates models in and out of distribution, and reports the results."""

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._io.processes import check_can_be_shared, gather_batches, rank_and_world_size
from .._version import __version__
from ..data.batches import ChangedBatches, batches, split_labels
from ..data.groups import groups_of
from ..data.loading import load_if_named, ood_groups
from ..data.zero_shot import ZeroShotClassifier
from ..models.decision import Decision
from ..models.decision_settings import typed_settings
from ..models.task import config_inside
from ..uncertainty.decomposition import decompose
from ..uncertainty.detectors import Detector, as_detector, ood_score
from ..uncertainty.features import AnswerReader, without_decision
from ..uncertainty.metrics import exact_mean, ood_metrics
from ..uncertainty.rewards import RewardFit
from ..uncertainty.single_label import SingleLabelFit
from ..uncertainty.task import Rows, TaskFit
from ..uncertainty.tasks import task_fit_of
from .curves import reliability_curve, risk_curve, roc_curve, score_histograms
from .details import details_of
from .gains import jackknife_values, packed_rows
from .promises import promises_by_group, shares_asked_for
from .report import CORRUPTION, ID, Metrics, Report
from .table import DATA


# Shown beside any other score: it needs no fit, and is often better than the maximum probability.
ENERGY = "energy"
Groups = dict[str, Sequence[str]]  # see `Report.groups`


def evaluate_uncertainty(
    models: nn.Module | Mapping[str, nn.Module],
    data: Any,
    ood_data: Any = None,
    *,
    score: str | Detector = "msp",
    corruptions: Mapping[str, Mapping[Any, Any]] | None = None,
    class_prompts: Mapping[str, Tensor] | None = None,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    batch_size: int = 32,
) -> Report:
    """Evaluate models of any task in and out of distribution. Each predicts on its own device.

    What a calibrated model decides is measured, too: how much it answers, and how much of that is
    wrong.

    Args:
        models (`nn.Module` or `Mapping[str, nn.Module]`): a Hydra, a Hugging Face classifier or a
            baseline; or several of one task, `{name: model}`.
        data (`DataLoader`, `Dataset` or `list`): labelled data: a DataLoader, a list of dict
            batches, a Dataset or list of dict rows; or the name, folder or file of a data set,
            which `load_data` reads for the first model, as with `ood_data`. For reward models
            `{"chosen": data, "rejected": data}`, or texts in columns of these names.
        ood_data (*optional*): `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, or one
            data set.
        score (`str` or `Detector`, defaults to `"msp"`): the OOD score of single-label models: a
            name, see `ood_score`, or a `Detector`. A fitted detector belongs to one model: evaluate
            each by itself, and join the reports (`joined`).
        corruptions (*optional*): labelled data under shift, `{corruption: {severity: data}}`, such
            as the result of `hydra_transformers.shift.corrupted_sets`.
        class_prompts (*optional*): for CLIP and SigLIP, the tokenizer's output with one prompt per
            class.
        column (`str` or pair of `str`, *optional*), label (`str`, *optional*): the columns of a
            DataFrame or of a named set, as for `load_data`; by default those that the first model
            was fine-tuned on, or found.
        batch_size (`int`, defaults to 32): rows per batch, where data comes in rows.

    Returns:
        `Report`: the metrics of each model on each data set. With `torch.distributed` initialised,
        the processes share the batches of single-label models: give every process the whole data in
        the same order; all get the same report.

    Example:
        >>> models = {"One": backbone, "Hydra": hydra}  # doctest: +SKIP
        >>> print(evaluate_uncertainty(models, test, {"noise": noise}))  # doctest: +SKIP
    """
    # Models of one task.
    models = _named(models)
    tasks = _tasks(models, data)
    task = next(iter(tasks.values()))
    first_model = next(iter(models.values()))
    if not task.has_detector and (score != "msp" or class_prompts is not None):
        raise ValueError(f"score and class_prompts are for single-label models, not for {task.title}: leave them out")

    # The data sets, each of which every model reads.
    if column is not None or label is not None:
        if isinstance(task, RewardFit):
            raise ValueError("column and label are not for reward models: call the columns chosen and rejected")
        data = load_if_named(data, first_model, labelled=True, column=column, label=label)
    name_of_data = ""
    if isinstance(data, (str, os.PathLike)):
        name_of_data = os.fspath(data)
    data = task.load(data, first_model)
    if task.has_detector:
        ood_data = load_if_named(ood_data, first_model, labelled=False, column=column)
    else:
        ood_data = load_if_named(ood_data, first_model, column=column)
    data_sets, groups = _data_sets(data, ood_data, corruptions or {})
    is_read_again = len(models) > 1 or bool(corruptions)
    for name, data_set in data_sets.items():
        if isinstance(data_set, ChangedBatches):
            data_set = data_set.data
        if is_read_again and hasattr(data_set, "__next__"):
            raise TypeError(f"{name} is an iterator, which can be read once: pass a list, a Dataset or a DataLoader")
        if task.has_detector:
            check_can_be_shared(data_set, name)
    detector = as_detector(score)
    if detector.needs_fit and len(models) > 1:
        raise ValueError(f"score is {detector.name}, fitted on one model: evaluate each by itself and join reports")

    # Measure every model on every data set.
    about = {"data": name_of_data, "date": date.today().isoformat(), "version": __version__}
    report = Report(task.name, {}, "uncertainty of the prediction", groups, about=about)
    if task.has_detector:
        report = replace(report, score=detector.description)
    for model_name, model in models.items():
        if class_prompts is not None:
            model = ZeroShotClassifier(model, class_prompts)
        model, decision = without_decision(model)
        reader = _Reader(tasks[model_name], model, decision, detector, batch_size)
        measured = {}
        for name, data_set in data_sets.items():
            group, _, _ = groups[name]
            measured[name] = reader.measure(name, data_set, labelled=group in (ID, CORRUPTION))
        _warn_of_useless_results(model_name, task, measured, groups)
        metrics, curves, rows = _results(measured, groups)
        report.models[model_name] = metrics
        report.curves[model_name] = curves
        report.rows[model_name] = rows
        report.num_members[model_name] = measured[DATA].num_members
        if decision is not None:
            promises = promises_by_group(typed_settings(decision.settings).validation, measured[DATA].values)
            if promises:
                report.promises[model_name] = promises
        report.details[model_name] = _details(model, measured[DATA], decision, tasks[model_name], data)
    return report


def _details(
    model: nn.Module, measured: "_Measured", decision: Decision | None, task: TaskFit, data: Any
) -> dict[str, Any]:
    """Return what a report's page says of a model."""
    description = type(model).__name__
    if measured.num_members > 1:
        description += f", {measured.num_members} members"
    name = getattr(config_inside(model), "name_or_path", "")
    if name:
        description += f", from {name}"
    details: dict[str, Any] = {"model": description, "promise": []}
    if decision is not None:
        settings = typed_settings(decision.settings)
        details["promise"] = list(settings.sentences)
        details["asked_for"] = shares_asked_for(settings)
    if "prediction" in measured.values and "label" in measured.values:
        details |= details_of(measured.values, task.classes, data)
    return details


def _named(models: nn.Module | Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return models by their names; raise for what is not a model."""
    if not isinstance(models, Mapping):
        models = {type(models).__name__: models}
    for name, model in models.items():
        if not isinstance(model, nn.Module):
            raise TypeError(f"{name} is not a model: pass one model, or several as {{name: model}}")
    if not models:
        raise ValueError("models is empty: pass at least one model")
    return dict(models)


def _tasks(models: Mapping[str, nn.Module], data: Any) -> dict[str, TaskFit]:
    """Return each model's task; raise for models of several."""
    tasks: dict[str, TaskFit] = {name: task_fit_of(model) for name, model in models.items()}
    names = {task.name for task in tasks.values()}
    are_pairs = isinstance(data, Mapping) and set(data) == {"chosen", "rejected"}
    # A plain model of one output has no aggregate.
    if all(task.predicts_numbers for task in tasks.values()) and (are_pairs or len(names) > 1):
        tasks = {name: RewardFit(model) for name, model in models.items()}
    first = next(iter(tasks.values()))
    for name, task in tasks.items():
        if task.name != first.name:
            raise ValueError(f"{name} is for {task.title}, the first for {first.title}: compare models of one task")
    return tasks


def _data_sets(
    data: Any, ood_data: Any, corruptions: Mapping[str, Mapping[Any, Any]]
) -> tuple[dict[str, Any], Groups]:
    """Return the data sets by their names in the report, and their groups, see `Report.groups`."""
    if not isinstance(corruptions, Mapping) or not all(isinstance(sweep, Mapping) for sweep in corruptions.values()):
        raise TypeError("corruptions is not {corruption: {severity: data}}: pass corrupted_sets(data, names)")
    titles = [DATA]
    data_sets = {DATA: data}
    groups: Groups = {DATA: (ID, DATA, "")}

    # Out-of-distribution data sets.
    has_none = isinstance(ood_data, Mapping) and not ood_data
    sets_of_groups = {} if has_none else ood_groups(ood_data)
    for group, sets in sets_of_groups.items():
        if group in (ID, CORRUPTION):
            raise ValueError(f"ood_data has a group called {group!r}, as the report calls others: rename it")
        for name, rows in sets.items():
            title = name if group == "OOD" else f"{name} ({group})"
            titles.append(title)
            data_sets[title] = rows
            groups[title] = (group, name, "")

    # Corrupted data sets.
    for corruption, sweep in corruptions.items():
        for severity, rows in sweep.items():
            title = f"{corruption}, severity {severity}"
            titles.append(title)
            data_sets[title] = rows
            groups[title] = (CORRUPTION, corruption, str(severity))

    if len(data_sets) < len(titles):
        raise ValueError(f"two data sets have one name ({', '.join(titles)}): rename one")
    return data_sets, groups


# One model on one data set


@dataclass
class _Measured:
    """What one model does on one data set.

    metrics: of the task
    scores: (rows,), higher is less sure
    num_members: of the model
    constant: the first metric of always predicting the same
    values: per row what intervals and curves need
    energies: a second score, (rows,)
    """

    metrics: Metrics
    scores: Tensor
    num_members: int
    constant: float | None = None
    values: Mapping[str, Tensor] = field(default_factory=dict)
    energies: Tensor | None = None


@dataclass(frozen=True)
class _Reader:
    """Measures one model on data sets.

    task: the model's
    model: predicts, and does not apply its decision
    decision: the model's own, where it is calibrated
    score: the OOD score of single-label models
    batch_size: rows per batch
    """

    task: TaskFit
    model: nn.Module
    decision: Decision | None
    score: Detector
    batch_size: int

    def measure(self, name: str, data: Any, labelled: bool) -> _Measured:
        """Measure the model on one data set, which errors call `name`."""
        group = self._groups(data, labelled)
        if self.task.has_detector:
            return self._measure_by_batch(name, data, labelled, group)
        answers, labels = self.task.collect(self.model, data, self.batch_size)
        if labelled and labels is None:
            raise ValueError(f"{name} has no labels: add a column labels")

        def metrics_of(rows: Any) -> Metrics:
            decided = None
            if self.decision is not None:
                group_of_rows = None if group is None else group[rows]
                decided = self.task.decide(self.decision, answers[rows], group_of_rows)
            labels_of_rows = None
            if labels is not None:
                labels_of_rows = labels[rows]
            return self.task.measure(answers[rows], labels_of_rows, decided)

        num_rows, num_members = answers.shape[:2]
        metrics = metrics_of(slice(None))
        metrics["num_samples"] = num_rows

        # What intervals need.
        values = {}
        if labelled and name == DATA:
            first = next(iter(self.task.metrics))
            values["first_metric"] = jackknife_values(lambda rows: metrics_of(rows).get(first, math.nan), num_rows)
            # Of pairs nobody knows which rows are relevant.
            of_pairs = isinstance(data, Mapping)
            if group is not None and labels is not None and self.decision is not None and not of_pairs:
                values |= self._values_of_groups(self.decision, answers, labels, group)
        constant = None
        if labelled and labels is not None:
            constant = self.task.constant_metric(labels)
        return _Measured(metrics, self.task.scores(answers), num_members, constant, values)

    def _groups(self, data: Any, labelled: bool) -> Tensor | None:
        """Return the group of each row by the column of the decision, (rows,); None without one.

        Rows without labels, which may be of another origin, need no such column: then none is
        answered.
        """
        settings = None if self.decision is None else typed_settings(self.decision.settings)
        if settings is None or settings.by_group is None:
            return None
        if rank_and_world_size()[1] > 1:
            raise ValueError("the model answers by a column, and several processes share the rows: evaluate it in one")
        rows = data["chosen"] if isinstance(data, Mapping) else data
        try:
            return settings.by_group.indices(groups_of(rows, settings.by_group.column))
        except (TypeError, ValueError):
            if labelled:
                raise
            return None

    def _values_of_groups(
        self, decision: Decision, answers: Tensor, labels: Tensor, group: Tensor
    ) -> dict[str, Tensor]:
        """Return what promises by group need of each row, (rows,) each."""
        random = torch.Generator().manual_seed(0)
        decided = self.task.decide(decision, answers, group)
        outcomes = self.task.outcomes(decided, labels, decision.settings, random)
        wrong = torch.zeros_like(outcomes.answered)
        if outcomes.wrong is not None:
            wrong[outcomes.answered] = outcomes.wrong
        return {"answered": outcomes.answered, "wrong": wrong, "group": group}

    def _measure_by_batch(self, name: str, data: Any, labelled: bool, group: Tensor | None) -> _Measured:
        """Measure a single-label model: no logits are kept, and processes share the batches.

        group: (rows,), of a model that answers by a column
        """
        reads_features = self.score.reads_features or bool(self.decision and self.decision.reads_features)
        reader = AnswerReader(self.model, reads_features)
        parts = []  # of each batch: values per row, and the number of members
        for batch in batches(data, self.batch_size, reader.device, *rank_and_world_size()):
            member_logits, features = reader(batch)
            labels = None
            if labelled:
                _, labels = split_labels(batch)
                if labels is None:
                    raise ValueError(f"{name} has no labels: add a column labels (or label) with class indices")
            group_of_rows = None
            if group is not None:
                group_of_rows, group = group.split([len(member_logits), len(group) - len(member_logits)])
            values_of_rows = self._values_of_rows(Rows(member_logits, labels, features), group_of_rows)
            parts.append((values_of_rows, member_logits.shape[1]))

        # The values of all rows, from all processes.
        parts = gather_batches(parts)
        if not parts:
            raise ValueError(f"{name} is empty: pass at least one sample")
        first_values, num_members = parts[0]
        values = {value: torch.cat([part[value] for part, _ in parts]) for value in first_values}
        threshold = None
        if self.decision is not None:
            threshold = typed_settings(self.decision.settings).threshold
        if threshold is None:
            values.pop("answered", None)

        # Their summary.
        num_rows = len(values["score"])
        metrics = cast(SingleLabelFit, self.task).summarize(values)
        for part in ("total", "aleatoric"):
            metrics[part] = exact_mean(values[part])
        metrics["num_samples"] = num_rows
        most_frequent = None
        if labelled:
            if threshold is not None:
                metrics["threshold"] = float(threshold)
            most_frequent = float(values["label"].bincount().max()) / num_rows
        energies = None
        if self.score.name != ENERGY:
            energies = values["energy"]
        return _Measured(metrics, values["score"], num_members, most_frequent, values, energies)

    def _values_of_rows(self, rows: Rows, group: Tensor | None) -> dict[str, Tensor]:
        """Return what is measured of each row of a batch: name -> (rows,), on the CPU."""
        member_logits = rows.answers
        decided = None
        if self.decision is not None:
            decided = self.decision(rows.answers, rows.features, group)
            member_logits = decided.member_logits
        values = cast(SingleLabelFit, self.task).row_values(rows, decided, self.score)
        values["energy"] = ood_score(member_logits, ENERGY).cpu()
        if rows.labels is not None:
            values["label"] = rows.labels.cpu()
            values["prediction"] = decompose(member_logits).prediction.cpu()
            values["wrong"] = values["prediction"] != values["label"]
        if group is not None:
            values["group"] = group.cpu()
        return values


# All data sets of one model


def _results(measured: Mapping[str, _Measured], groups: Groups) -> tuple[dict[str, Metrics], dict, dict]:
    """Return the `models`, `curves` and `rows` of a report for one model.

    The metrics say how well the score tells OOD and corrupted data, too.
    """
    known = measured[DATA]
    ood_scores = {}
    for name, data_set in measured.items():
        group, _, _ = groups[name]
        if group not in (ID, CORRUPTION):
            ood_scores[name] = data_set.scores

    # Metrics, with those of detection.
    metrics = {name: dict(data_set.metrics) for name, data_set in measured.items()}
    ood_by_group: dict[str, dict[str, Tensor]] = {}
    for name, data_set in measured.items():
        group, short_name, _ = groups[name]
        if name in ood_scores:
            ood_by_group.setdefault(group, {})[short_name] = data_set.scores
            metrics[name] |= ood_metrics(known.scores, data_set.scores)
            if data_set.energies is not None:
                metrics[name]["energy_auroc"] = ood_metrics(known.energies, data_set.energies)["auroc"]
        elif group == CORRUPTION:
            metrics[name]["shift_auroc"] = ood_metrics(known.scores, data_set.scores)["auroc"]
            aurocs = [ood_metrics(data_set.scores, scores)["auroc"] for scores in ood_scores.values()]
            if aurocs:
                metrics[name]["ood_auroc"] = math.fsum(aurocs) / len(aurocs)

    # Curves.
    curves: dict[str, Any] = {
        "roc": {name: roc_curve(known.scores, scores) for name, scores in ood_scores.items()},
        "histograms": score_histograms(known.scores, ood_scores),
    }
    if "correct" in known.values:
        confidence = known.values["confidence"]
        correct = known.values["correct"]
        curves["reliability"] = reliability_curve(confidence, correct)
        curves["risk_coverage"] = risk_curve(confidence, correct)

    # Numbers per row.
    kept: dict[str, Any] = {}
    for value in ("correct", "nll", "first_metric"):
        if value in known.values:
            kept[value] = known.values[value]
    kept["score"] = known.scores
    kept["ood"] = ood_by_group
    return metrics, curves, packed_rows(kept)


def _warn_of_useless_results(name: str, task: TaskFit, measured: Mapping[str, _Measured], groups: Groups) -> None:
    """Warn of a model that learned nothing, and of OOD data that is the data."""
    known = measured[DATA]
    metric, (title, better) = next(iter(task.metrics.items()))
    value = known.metrics.get(metric)
    constant = known.constant
    is_useless = False
    if value is not None and constant is not None:
        is_useless = value <= constant if better == "high" else value >= constant
    if constant == 1.0:
        warnings.warn("all labels of data are of one class: the metrics say nothing of the others", stacklevel=3)
    elif is_useless:
        warnings.warn(
            f"{name} is no better than always predicting the same ({title} {value:.4g}; the most frequent class, or "
            f"the mean, has {constant:.4g}): it has learned nothing about these data",
            stacklevel=3,
        )

    known_values = known.values.get("confidence", known.scores).sort().values
    for data_name, data_set in measured.items():
        group, _, _ = groups[data_name]
        values = data_set.values.get("confidence", data_set.scores).sort().values
        if group not in (ID, CORRUPTION) and torch.equal(known_values, values):
            warnings.warn(f"{name} predicts {data_name} exactly as data: are they the same data?", stacklevel=3)
