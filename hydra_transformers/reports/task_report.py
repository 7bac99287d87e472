"""Evaluates models of tasks that do not choose one class, and reports the results as one table."""

import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from .._io.files import parse_json, write_atomically
from ..data.loading import load_data, load_if_named, ood_groups
from ..data.prediction import classes_of, config_of
from ..uncertainty.features import without_decision
from ..uncertainty.metrics import ood_metrics
from ..uncertainty.rewards import aggregate_of, preference_metrics
from ..uncertainty.task_calibration import collect_rows
from .gains import map_leaves
from .report import UncertaintyReport
from .table import NO_VALUE, Cell, Part, Table, Title, html_page, to_html, to_markdown, to_text


if TYPE_CHECKING:
    import pandas
    from huggingface_hub import EvalResult

Metrics = dict[str, float]


@dataclass(frozen=True)
class Evaluation:
    """How a task is judged.

    task: its name, for the title
    columns: metric -> (its title, "high" or "low" for what is better, "" for neither), in the order of the table
    measure: answers, labels and decision of all rows -> metrics; without labels (None) what can be said without them
    needs_classes: whether `measure` is told the names of the model's classes, too
    scores: answers -> (rows,), higher is less sure, by which rows from elsewhere are told apart
    collect: reads all answers and labels of a data set, see `TaskFit`
    """

    task: str
    columns: Mapping[str, tuple[str, str]]
    measure: Callable[..., Metrics] | None
    scores: Callable[[Any], Tensor] | None
    collect: Callable[[nn.Module, Any, int], tuple[Any, Any]] = collect_rows
    needs_classes: bool = False

    def load(self, data: Any, model: nn.Module) -> Any:
        """Data that is named by a Hub name, folder or file; other data as it is."""
        return load_if_named(data, model, labelled=True)

    def result(self, model: nn.Module, data: Any, ood_data: Any, batch_size: int) -> "TaskResult":
        """The results of one model. What its calibration decides is measured, too."""
        model, decision = without_decision(model)
        answers, labels = self.collect(model, data, batch_size)
        if labels is None:
            raise ValueError("data has no labels: add a column labels")
        measure = partial(self.measure, classes=classes_of(model)) if self.needs_classes else self.measure
        known = measure(answers, labels, None if decision is None else decision(answers))
        scores, ood = self.scores(answers), {}
        for group, sets in ood_groups(ood_data).items():
            for name, each in sets.items():
                foreign, foreign_labels = self.collect(model, each, batch_size)
                found = measure(foreign, foreign_labels, None if decision is None else decision(foreign))
                ood[set_name(group, name)] = found | {"auroc": ood_metrics(scores, self.scores(foreign))["auroc"]}
        points = 2 if getattr(config_of(model), "predicts_variance", False) else 1  # in place of each member
        return TaskResult(len(answers), answers[:1].shape[1] // points, known, ood)


class PairEvaluation(Evaluation):
    """How reward models are judged: by pairs, of which one was preferred."""

    def load(self, data: Any, model: nn.Module) -> Any:
        """{"chosen": data, "rejected": data}, also of a set with two columns of texts of these names."""
        is_named = isinstance(data, (str, os.PathLike))
        has_texts = hasattr(data, "__getitem__") and not isinstance(data, Mapping) and len(data) > 0
        if is_named or (has_texts and isinstance(data[0], Mapping) and isinstance(data[0].get("chosen"), str)):
            return {name: load_data(data, model, text=name, labelled=False) for name in ("chosen", "rejected")}
        return load_if_named(data, model, labelled=False)

    def result(self, model: nn.Module, data: Any, ood_data: Any, batch_size: int) -> "TaskResult":
        if ood_data is not None:
            raise ValueError("ood_data has no preferences that a reward model could be judged by: leave it out")
        model, decision = without_decision(model)
        answers, _ = self.collect(model, data, batch_size)
        found = preference_metrics(*answers.unbind(dim=-1), aggregate_of(model))
        if decision is not None:
            found["answered"] = float((~decision(answers[..., :1]).abstain).double().mean())
        return TaskResult(len(answers), answers.shape[1], found)


@dataclass(frozen=True)
class TaskResult:
    """The results of one model.

    rows, num_members: of the data and the model
    metrics: on the data
    ood: data set from elsewhere -> `auroc`, how well the uncertainty tells it from the data, and the metrics on it
    """

    rows: int
    num_members: int
    metrics: Metrics
    ood: dict[str, Metrics] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class TaskReport:
    """The results of one or several models on the same data. Printed or shown in a notebook: its tables.

    task: its name
    models: name -> `TaskResult`
    columns: see `Evaluation`
    """

    task: str
    models: dict[str, TaskResult]
    columns: dict[str, tuple[str, str]]

    def parts(self) -> list[Part]:
        found: list[Part] = [
            Title(f"Results: {self.task}"),
            self._table({n: r.metrics for n, r in self.models.items()}),
        ]
        for name in dict.fromkeys(name for result in self.models.values() for name in result.ood):
            results = {model: result.ood[name] for model, result in self.models.items() if name in result.ood}
            found += [Title(f"From elsewhere: {name}", 3), self._table(results)]
        return found

    def _table(self, results: Mapping[str, Metrics]) -> Table:
        columns = {**self.columns, "auroc": ("AUROC", "high")}
        columns = {name: each for name, each in columns.items() if any(name in found for found in results.values())}
        best = {
            name: _best([found.get(name) for found in results.values()], side) for name, (_, side) in columns.items()
        }
        rows = [
            [model, *(_cell(found.get(name), best[name] if len(results) > 1 else None) for name in columns)]
            for model, found in results.items()
        ]
        return Table(["Model", *(title for title, _ in columns.values())], rows)

    def __str__(self) -> str:
        return to_text(self.parts())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self.parts())

    def to_markdown(self) -> str:
        return to_markdown(self.parts())

    def to_html(self, path: str | os.PathLike | None = None) -> str:
        """All tables as one page that needs no other file; also written to `path`."""
        page = html_page(f"Uncertainty report: {self.task}", self.parts(), {})
        if path is not None:
            write_atomically(path, page)
        return page

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each model and data set: `model`, `members`, `data_set` (None for the data) and the metrics."""
        import pandas

        rows = []
        for name, result in self.models.items():
            model = {"model": name, "members": result.num_members}
            rows.append(model | {"data_set": None} | result.metrics)
            rows += [model | {"data_set": each} | found for each, found in result.ood.items()]
        return pandas.DataFrame(rows)

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """The report as JSON text, what is not a finite number as text; also written to `path` where given."""
        content = map_leaves(asdict(self), lambda v: str(v) if isinstance(v, float) and not math.isfinite(v) else v)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text

    def to_eval_results(
        self,
        dataset_name: str,
        dataset_type: str | None = None,
        model: str | None = None,
        task_type: str | None = None,
    ) -> "list[EvalResult]":
        """One model's results as metadata of its card, as `UncertaintyReport.to_eval_results` gives them."""
        from huggingface_hub import EvalResult

        result = self.models[model or next(iter(self.models))]
        return [
            EvalResult(
                task_type=task_type or self.task,
                dataset_type=dataset_type or dataset_name.lower().replace(" ", "-"),
                dataset_name=dataset_name,
                metric_type=metric,
                metric_name=title,
                metric_value=round(result.metrics[metric], 6),
            )
            for metric, (title, _) in self.columns.items()
            if metric in result.metrics
        ]

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "TaskReport":
        """Reads a report that `to_json(path)` wrote."""
        try:
            content = parse_json(Path(path).read_bytes())
            content = map_leaves(content, lambda v: float(v) if v in ("inf", "-inf", "nan") else v)
            models = {name: TaskResult(**result) for name, result in content["models"].items()}
            columns = {name: tuple(each) for name, each in content["columns"].items()}
            return cls(content["task"], models, columns)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is no report of a task: pass a file that to_json wrote") from error


def read_report(path: str | os.PathLike) -> UncertaintyReport | TaskReport:
    """The report in a file that `to_json` wrote, of whichever task."""
    try:
        is_task = "columns" in parse_json(Path(path).read_bytes())
    except ValueError:
        is_task = False  # the other says what is wrong
    return (TaskReport if is_task else UncertaintyReport).from_json(path)


def set_name(group: str, name: str) -> str:
    """What a data set from elsewhere is called in results."""
    return name if group == "OOD" else f"{name} ({group})"


def _best(values: list[float | None], side: str) -> float | None:
    found = [value for value in values if value is not None and not math.isnan(value)]
    return None if not found or not side else (max if side == "high" else min)(found)


def _cell(value: float | None, best: float | None) -> str | Cell:
    if value is None or math.isnan(value):
        return NO_VALUE
    return Cell(f"{value:.4g}", "bold" if best is not None and value == best else "")
