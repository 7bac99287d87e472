"""The results of models of any task: tables, JSON, a page, card metadata and plots."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .._io.files import parse_json, write_atomically
from ..uncertainty.task import Task
from ..uncertainty.tasks import TASKS
from .gains import Gain, gain_sentence, gains, map_leaves
from .table import DATA, NO_VALUE, Section, Table, html_page, to_html, to_markdown, to_text


if TYPE_CHECKING:
    import pandas
    from huggingface_hub import EvalResult

Metrics = dict[str, float]
ID, CORRUPTION = "id", "corruption"  # groups of data sets beside those of OOD data
# metric -> (title, which way is better), beside those of the tasks
DETECTION = {
    "auroc": ("AUROC", "high"),
    "fpr95": ("FPR95", "low"),
    "aupr": ("AUPR", "high"),
    "energy_auroc": ("AUROC by energy", "high"),  # so that no method loses by the choice of score
}
SHIFT = {"shift_auroc": ("AUROC against clean", ""), "ood_auroc": ("OOD AUROC", "high")}
SHARES = {*DETECTION, *SHIFT, "accuracy", "answered", "answered_risk", "answered_right", "set_coverage"}
SHARES |= {"map", "f1_micro", "f1_macro", "exact_match", "missed", "set_missed", "entity_f1", "precision", "recall"}
SHARES |= {"pair_accuracy", "wrong_pairs_auroc", "interval_coverage"}
MEANINGS = {
    "OOD": "Out-of-distribution: unlike the data that the model was made for; near resembles it, far does not.",
    "NLL": "Negative log-likelihood of the right class, in nats.",
    "ECE": "Expected calibration error: how far confidence lies from accuracy; aECE: over bins with equally many rows.",
    "AURC": "Area under the risk-coverage curve: the mean error rate over all shares of rows, the most confident first.",
    "AUROC": "How often an OOD row gets a higher score than an in-distribution row; 50 % is chance.",
    "FPR95": "Share of in-distribution rows that are refused where 95 % of the OOD rows are.",
    "MI": "Mutual information, in nats: the part of the uncertainty that comes from members that disagree.",
    "DI": "Disagreement: the share of pairs of members that predict different classes.",
}


@dataclass(frozen=True, repr=False)
class Report:
    """The results of one or several models on the same data. Printed or shown in a notebook: its main tables.

    Attributes:
        task (`str`): the models' task, such as "single_label_classification".
        models (`dict`): model -> data set -> metric -> value. The in-distribution data set is called "data"; `groups` has the
            others. Every metric is a fraction or a number as its function defines it, not a percentage.
        score (`str`): the OOD score, by which `auroc`, `fpr95` and `aupr` of OOD data sets are measured.
        groups (`dict`): data set -> (group, name, severity); the group is "id", a group of OOD data (near, far), or
            "corruption".
        num_members (`dict`): model -> members of the ensemble; 1 for a plain model.
        curves (`dict`): model -> the curves that `plot` draws.
        rows (`dict`): model -> a few numbers per row, packed, by which `gains` compares models row by row.
    """

    task: str
    models: dict[str, dict[str, Metrics]]
    score: str = "msp"
    groups: dict[str, Sequence[str]] = field(default_factory=lambda: {DATA: (ID, DATA, "")})
    num_members: dict[str, int] = field(default_factory=dict)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    def data_sets(self, group: str | None = None) -> list[str]:
        """The OOD data sets, of all groups or one; or the corrupted ones."""
        return [
            name
            for name, (of_group, *_) in self.groups.items()
            if of_group == group or (group is None and of_group not in (ID, CORRUPTION))
        ]

    def average(self, model: str, group: str | None = None) -> Metrics:
        """Mean over the OOD data sets of one group; without a group over all of them, each counting the same (the paper's
        OOD Avg: not the mean of the near and the far average, and not weighted by the number of samples)."""
        return _mean([self.models[model][name] for name in self.data_sets(group)])

    def severities(self, model: str) -> dict[str, Metrics]:
        """Severity -> mean over the corruptions that have it, as in ImageNet-C; "average": mean over the severities, as in
        the paper's tables 13 and 14. Empty without corruptions."""
        corrupted = [(self.groups[name][2], self.models[model][name]) for name in self.data_sets(CORRUPTION)]
        by_severity = {
            severity: _mean([metrics for place, metrics in corrupted if place == severity])
            for severity in sorted({severity for severity, _ in corrupted})
        }
        return by_severity | ({"average": _mean(list(by_severity.values()))} if by_severity else {})

    def joined(self, other: "Report") -> "Report":
        """A report with the models of this one and of another on the same data."""
        parts = ("models", "num_members", "curves", "rows")
        return replace(self, **{part: getattr(self, part) | getattr(other, part) for part in parts})

    def gains(self, model: str, other: str) -> dict[str, Gain]:
        """What one model gains over another, metric by metric, with 95 % intervals; see `Gain`."""
        return gains(self._task, self.rows.get(model, {}), self.rows.get(other, {}))

    # Forms

    def __str__(self) -> str:
        return to_text(self._sections()[:2])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self._sections()[:2])

    def to_markdown(self) -> str:
        """All tables as markdown."""
        return to_markdown(self._sections())

    def to_html(self, path: str | os.PathLike | None = None, pictures: Sequence[Path] | None = None) -> str:
        """All tables and plots as one page that needs no other file and no network.

        Args:
            path (`str` or `os.PathLike`, *optional*): where to write it.
            pictures (`Sequence[Path]`, *optional*): PNG files that `plot` wrote, to use instead of drawing them again.
        """
        if pictures is None:
            from .._io.pictures import png_of
            from .report_plots import report_figures

            pngs = {name: png_of(figure) for name, figure in report_figures(self).items()}
        else:
            pngs = {Path(picture).stem: Path(picture).read_bytes() for picture in pictures}
        legend = ("What the abbreviations mean", [f"{short}: {meaning}" for short, meaning in MEANINGS.items()])
        page = html_page(f"Report: {self._task.title}", [*self._sections(), legend], pngs)
        if path is not None:
            write_atomically(path, page)
        return page

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each model and data set: `model`, `members`, `group`, `data_set`, `severity` and a column for each metric,
        empty where it was not measured."""
        import pandas

        rows = []
        for model, results in self.models.items():
            for name, metrics in results.items():
                group, data_set, severity = self.groups[name]
                place = {"model": model, "members": self.num_members.get(model), "group": group}
                rows.append(place | {"data_set": data_set, "severity": severity or None} | metrics)
        return pandas.DataFrame(rows)

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """The report as JSON text; also written to `path` where given. `from_json` reads it back, plots included."""
        # JSON has no infinity and no NaN: they become strings.
        content = map_leaves(asdict(self), lambda v: str(v) if isinstance(v, float) and not math.isfinite(v) else v)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "Report":
        """Reads a report that `to_json(path)` wrote."""
        try:
            content = parse_json(Path(path).read_bytes())
            content = map_leaves(content, lambda v: float(v) if v in ("inf", "-inf", "nan") else v)
            report = cls(**{**content, "groups": {name: tuple(group) for name, group in content["groups"].items()}})
            report._sections()  # what is broken fails here, not when the report is printed
            return report
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a report: pass a file that to_json wrote") from error

    def to_eval_results(
        self,
        dataset_name: str,
        dataset_type: str | None = None,
        model: str | None = None,
        task_type: str = "image-classification",
    ) -> "list[EvalResult]":
        """One model's results as metadata of its card: `ModelCardData(model_name=..., eval_results=...)`.

        Args:
            dataset_name (`str`): the in-distribution data, as people call it ("CIFAR-100").
            dataset_type (`str`, *optional*): its id on the Hub ("cifar100"); made from the name where not given.
            model (`str`, *optional*): which model; needed when the report has several.
            task_type (`str`): the pipeline's name of the task.
        """
        from huggingface_hub import EvalResult

        if model not in self.models and (model is not None or len(self.models) > 1):
            raise ValueError(f"the report has the models {', '.join(self.models)}: name one of them, not {model!r}")
        model = model or next(iter(self.models))
        rows = [(name, title, self.models[model][DATA].get(name)) for name, (title, _) in self._task.metrics.items()]
        for group in (*self._ood_groups(), None) if self.data_sets() else ():
            average = self.average(model, group)
            where = f"{_prefix(group)}OOD average"
            rows += [
                (name, f"{DETECTION[name][0]} ({where})", average.get(name)) for name in ("auroc", "fpr95", "aupr")
            ]
        return [
            EvalResult(
                task_type=task_type,
                dataset_type=dataset_type or dataset_name.lower().replace(" ", "-"),
                dataset_name=dataset_name,
                metric_type=metric,
                metric_name=title,
                metric_value=round(value, 6),
            )
            for metric, title, value in rows
            if value is not None and math.isfinite(value)  # the metadata has no infinity
        ]

    def plot(self, folder: str | os.PathLike) -> list[Path]:
        """Draws what the report has curves for into PNG files in `folder`, and returns their paths: reliability_diagram,
        risk_coverage, score_histograms, and for each OOD data set roc_NAME with all models."""
        from .._io.pictures import write_png
        from .report_plots import report_figures

        return [write_png(figure, Path(folder) / f"{name}.png") for name, figure in report_figures(self).items()]

    # Tables

    @property
    def _task(self) -> type[Task]:
        return TASKS[self.task]

    def _ood_groups(self) -> list[str]:
        """Those of OOD data sets; none where they were given without groups."""
        return list(dict.fromkeys(g for g, *_ in self.groups.values() if g not in (ID, CORRUPTION, "OOD")))

    def _errors_at_equal_coverage(self) -> tuple[str, Metrics]:
        """The error rate of each model where all answer as much as the one that answers least, and the title of that column.
        Models that answer less make fewer errors, so their own thresholds do not compare them."""
        curves = {name: curves["risk_coverage"] for name, curves in self.curves.items() if "risk_coverage" in curves}
        answered = [self.models[name][DATA].get("answered") for name in curves]
        share = min((value for value in answered if value), default=0.0)
        if len(answered) < 2 or not share or set(answered) == {share}:
            return "", {}
        errors = {name: float(np.interp(share, curve["coverage"], curve["risk"])) for name, curve in curves.items()}
        return f"Wrong at {100 * share:.3g} % answered", errors

    def _sections(self) -> list[Section]:
        metrics = self._task.metrics
        first = next(iter(metrics))
        rows = {name: dict(self.models[name][DATA]) for name in self.models}
        main = {first: metrics[first]} | {name: metrics[name] for name in metrics if name.startswith("answered")}
        details = {name: metrics[name] for name in metrics if name not in main}
        title, errors = self._errors_at_equal_coverage()
        columns = {title: ("low", errors)} if errors else {}
        for group in self._ood_groups() or ([None] if self.data_sets() else []):
            aurocs = {name: self.average(name, group).get("auroc") for name in self.models}
            columns[f"{_prefix(group)}OOD AUROC"] = ("high", aurocs)
        for title, (better, values) in columns.items():
            main[title] = (title, better)
            for name in self.models:
                rows[name][title] = values.get(name)
        sentences = []
        if any(self.rows.values()):
            reference, *rest = self.models
            sentences = [gain_sentence(name, reference, self.gains(name, reference)) for name in rest]
        members = {name: {"Members": str(self.num_members.get(name, NO_VALUE))} for name in self.models}
        others_table = _table(rows, details)
        sections: list[Section] = [
            (f"Results: {self._task.title}", [_table(rows, main, members)]),
            (
                f"{'Intervals and other' if any(sentences) else 'Other'} metrics",
                [*filter(None, sentences), others_table],
            ),
        ]
        if self.data_sets():
            places = {(model, name): self.models[model][name] for name in self.data_sets() for model in self.models}
            for group in (group for group in (*self._ood_groups(), None) if len(self.data_sets(group)) > 1):
                places |= {
                    (model, f"{_prefix(group)}OOD average"): self.average(model, group) for model in self.models
                }
            explained = f"Score: {self.score}. Averages are over data sets, each counting the same."
            sections.append(("Out of distribution", [explained, _table_of_places(places, DETECTION | metrics)]))
        if self.data_sets(CORRUPTION):
            places = {
                (model, f"severity {name}" if name != "average" else name): row
                for model in self.models
                for name, row in self.severities(model).items()
            }
            names = dict.fromkeys(self.groups[name][1] for name in self.data_sets(CORRUPTION))
            explained = f"Mean over the corruptions ({', '.join(names)}); average: mean over the severities."
            sections.append(("Under corruption", [explained, _table_of_places(places, metrics | SHIFT)]))
        return sections


def _mean(metrics: Sequence[Metrics]) -> Metrics:
    names = [name for name in metrics[0] if all(name in row for row in metrics)] if metrics else []
    return {name: math.fsum(row[name] for row in metrics) / len(metrics) for name in names if name != "num_samples"}


def _prefix(group: str | None) -> str:
    return "" if group is None else f"{group}-"


def _table_of_places(places: Mapping[tuple[str, str], Metrics], columns: Mapping[str, tuple[str, str]]) -> Table:
    """A row for each model and data set."""
    header, rows = _table(places, columns, {place: {"Data": place[1]} for place in places})
    return header, [[model, *row[1:]] for (model, _), row in zip(places, rows, strict=True)]


def _table(
    results: Mapping[Any, Metrics],
    columns: Mapping[str, tuple[str, str]],
    texts: Mapping[Any, Mapping[str, str]] | None = None,
) -> Table:
    """A row for each model, with the columns that one of them has; `texts` stand before the numbers."""
    shown = [name for name in columns if any(row.get(name) is not None for row in results.values())]
    arrows, titles = {"high": " ↑", "low": " ↓", "": ""}, []
    for name in shown:
        title, better = columns[name]
        titles.append(f"{title}{' (%)' * (_is_share(name) and '%' not in title)}{arrows[better]}")
    texts = {key: {} for key in results} if texts is None else texts
    rows = [
        [str(key), *texts[key].values(), *(_text(name, row.get(name)) for name in shown)]
        for key, row in results.items()
    ]
    return ["Model", *next(iter(texts.values())), *titles], rows


def _is_share(metric: str) -> bool:
    return metric in SHARES or metric.endswith(("AUROC", "% answered"))


def _text(metric: str, value: float | None) -> str:
    if value is None or math.isnan(value):
        return NO_VALUE
    return f"{100 * value:.2f}" if _is_share(metric) else f"{value:.4g}"
