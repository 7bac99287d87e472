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
from ..uncertainty.task import TaskFit
from ..uncertainty.tasks import TASKS
from .details import bin_table, class_table, confusion_table, gallery_html
from .gains import Gain, gain_sentence, gains, map_leaves
from .promises import landed_table, section_of_promises
from .table import DATA, NO_VALUE, Section, Table, html_page, to_html, to_markdown, to_text


if TYPE_CHECKING:
    import pandas
    from huggingface_hub import EvalResult

Metrics = dict[str, float]
Columns = Mapping[str, tuple[str, str]]  # metric -> (title, "high", "low" or "" for what is better)

# Groups of data sets beside those of OOD data.
ID = "id"
CORRUPTION = "corruption"

# Metrics beside those of the tasks.
DETECTION = {
    "auroc": ("AUROC", "high"),
    "fpr95": ("FPR95", "low"),
    "aupr": ("AUPR", "high"),
    "energy_auroc": ("AUROC by energy", "high"),  # so that no method loses by the choice of score
}
SHIFT = {"shift_auroc": ("AUROC against clean", ""), "ood_auroc": ("OOD AUROC", "high")}
# Metrics that are shares, shown in %.
SHARES = {*DETECTION, *SHIFT, "accuracy", "answered", "answered_risk", "answered_right", "set_coverage"}
SHARES |= {"map", "f1_micro", "f1_macro", "exact_match", "missed", "set_missed", "entity_f1", "precision", "recall"}
SHARES |= {"pair_accuracy", "wrong_pairs_auroc", "interval_coverage"}
# Where a calibration's promises land.
PROMISED = ("answered", "answered_risk", "answered_right", "missed", "set_coverage", "set_missed", "interval_coverage")
ARROWS = {"high": " ↑", "low": " ↓", "": ""}
MEANINGS = {
    "OOD": "Out-of-distribution: unlike the data that the model was made for; near resembles it, far does not.",
    "NLL": "Negative log-likelihood of the right class, in nats.",
    "ECE": "Expected calibration error: how far confidence lies from accuracy; aECE: over bins with equally many "
    "rows.",
    "AURC": "Area under the risk-coverage curve: the mean error rate over all shares of rows, the most confident "
    "first.",
    "AUROC": "How often an OOD row gets a higher score than an in-distribution row; 50 % is chance.",
    "FPR95": "Share of in-distribution rows that are refused where 95 % of the OOD rows are.",
    "MI": "Mutual information, in nats: the part of the uncertainty that comes from members that disagree.",
    "DI": "Disagreement: the share of pairs of members that predict different classes.",
}


@dataclass(frozen=True, repr=False)
class Report:
    """The results of one or several models on the same data.

    Printed or shown in a notebook: its main tables.

    Attributes:
        task (`str`): the models' task, such as "single_label_classification".
        models (`dict`): model -> data set -> metric -> value. The in-distribution data set is
            called "data"; `groups` has the others. Every metric is a fraction or a number as its
            function defines it, not a percentage.
        score (`str`): the OOD score, by which `auroc`, `fpr95` and `aupr` of OOD data sets are
            measured.
        groups (`dict`): data set -> (group, name, severity); the group is "id", a group of OOD data
            (near, far), or "corruption".
        num_members (`dict`): model -> members of the ensemble; 1 for a plain model.
        curves (`dict`): model -> the curves that `plot` draws.
        rows (`dict`): model -> a few numbers per row, packed, by which `gains` compares models row
            by row.
        promises (`dict`): model -> its promises by class, and how they did on "data".
        about (`dict`): where the results come from: "data" (its name, where it has one), "date" and
            "version" of this package.
        details (`dict`): model -> what the page says of it: "model" (its class and name), "promise"
            (what its calibration says), "asked_for" (the shares that it was to keep), and of
            single-label models confusions, classes and examples.
    """

    task: str
    models: dict[str, dict[str, Metrics]]
    score: str = "msp"
    groups: dict[str, Sequence[str]] = field(default_factory=lambda: {DATA: (ID, DATA, "")})
    num_members: dict[str, int] = field(default_factory=dict)
    curves: dict[str, dict[str, Any]] = field(default_factory=dict)
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    promises: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)
    details: dict[str, dict[str, Any]] = field(default_factory=dict)

    def data_sets(self, group: str | None = None) -> list[str]:
        """Return the data sets of one group; without a group the OOD data sets, of all groups.

        Args:
            group (`str`, *optional*): "near", "far", "OOD" or "corruption".
        """
        names = []
        for name, (group_of_set, *_) in self.groups.items():
            is_ood = group_of_set not in (ID, CORRUPTION)
            if group_of_set == group or (group is None and is_ood):
                names.append(name)
        return names

    def average(self, model: str, group: str | None = None) -> Metrics:
        """Return the mean over the OOD data sets of one group; without a group over all of them.

        Each data set counts the same: this is the paper's OOD Avg, not the mean of the near and the
        far average, and not weighted by the number of samples.

        Args:
            model (`str`): its name in `models`.
            group (`str`, *optional*): as for `data_sets`.
        """
        return _mean([self.models[model][name] for name in self.data_sets(group)])

    def severities(self, model: str) -> dict[str, Metrics]:
        """Return severity -> mean over the corruptions that have it, as in ImageNet-C.

        "average" is the mean over the severities, as in the paper's tables 13 and 14. Empty without
        corruptions.

        Args:
            model (`str`): its name in `models`.
        """
        by_severity: dict[str, list[Metrics]] = {}
        for name in self.data_sets(CORRUPTION):
            _, _, severity = self.groups[name]
            by_severity.setdefault(severity, []).append(self.models[model][name])
        means = {severity: _mean(by_severity[severity]) for severity in sorted(by_severity)}
        if means:
            means["average"] = _mean(list(means.values()))
        return means

    def joined(self, other: "Report") -> "Report":
        """Return a report with the models of this one and of another on the same data.

        Args:
            other (`Report`): of other models.
        """
        return replace(
            self,
            models=self.models | other.models,
            num_members=self.num_members | other.num_members,
            curves=self.curves | other.curves,
            rows=self.rows | other.rows,
            promises=self.promises | other.promises,
            details=self.details | other.details,
        )

    def gains(self, model: str, other: str) -> dict[str, Gain]:
        """Return what one model gains over another, metric by metric, with 95 % intervals.

        Args:
            model (`str`), other (`str`): their names in `models`.
        """
        return gains(self._task, self.rows.get(model, {}), self.rows.get(other, {}))

    # Forms

    def __str__(self) -> str:
        return to_text(self._main_sections())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(self._main_sections())

    def to_markdown(self) -> str:
        """Return all tables as markdown."""
        return to_markdown(self._sections())

    def to_html(self, path: str | os.PathLike | None = None, pictures: Sequence[Path] | None = None) -> str:
        """Return all tables and plots as one page that needs no other file and no network.

        Args:
            path (`str` or `os.PathLike`, *optional*): where to write it.
            pictures (`Sequence[Path]`, *optional*): PNG files that `plot` wrote, to use instead of
                drawing them again.
        """
        if pictures is None:
            from .._io.pictures import png_of
            from .report_plots import report_figures

            pngs = {name: png_of(figure) for name, figure in report_figures(self).items()}
        else:
            pngs = {Path(picture).stem: Path(picture).read_bytes() for picture in pictures}
        meanings = [f"{short}: {meaning}" for short, meaning in MEANINGS.items()]
        legend = ("What the abbreviations mean", meanings)
        title = f"Report: {self._task.title}"
        page = html_page(title, [*self._sections(), legend], pngs, self._about(), self._details())
        if path is not None:
            write_atomically(path, page)
        return page

    def to_pandas(self) -> "pandas.DataFrame":
        """Return a row for each model and data set.

        Its columns are `model`, `members`, `group`, `data_set`, `severity` and one for each metric,
        empty where it was not measured.
        """
        import pandas

        rows = []
        for model, results in self.models.items():
            for name, metrics in results.items():
                group, data_set, severity = self.groups[name]
                row: dict[str, Any] = {
                    "model": model,
                    "members": self.num_members.get(model),
                    "group": group,
                    "data_set": data_set,
                    "severity": severity or None,
                }
                rows.append(row | metrics)
        return pandas.DataFrame(rows)

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """Return the report as JSON text, which `from_json` reads back, plots included.

        Args:
            path (`str` or `os.PathLike`, *optional*): where to write it, too.
        """

        def without_infinity(value: Any) -> Any:
            if isinstance(value, float) and not math.isfinite(value):
                return str(value)  # JSON has no infinity and no NaN
            return value

        content = map_leaves(asdict(self), without_infinity)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "Report":
        """Read a report that `to_json(path)` wrote.

        Args:
            path (`str` or `os.PathLike`): the file.
        """

        def with_infinity(value: Any) -> Any:
            if value in ("inf", "-inf", "nan"):
                return float(value)
            return value

        try:
            content = parse_json(Path(path).read_bytes())
            details = content.pop("details", {})  # has no infinities, and texts that may be called so
            content = map_leaves(content, with_infinity) | {"details": details}
            content["groups"] = {name: tuple(group) for name, group in content["groups"].items()}
            report = cls(**content)
            # What is broken fails here, not when the report is printed.
            report._sections()
            report._about()
            report._details()
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
        """Return one model's results as metadata of its card.

        For `ModelCardData(model_name=..., eval_results=...)`.

        Args:
            dataset_name (`str`): the in-distribution data, as people call it ("CIFAR-100").
            dataset_type (`str`, *optional*): its id on the Hub ("cifar100"); made from the name
                where not given.
            model (`str`, *optional*): which model; needed when the report has several.
            task_type (`str`): the pipeline's name of the task.
        """
        from huggingface_hub import EvalResult

        if model not in self.models and (model is not None or len(self.models) > 1):
            raise ValueError(f"the report has the models {', '.join(self.models)}: name one of them, not {model!r}")
        model = model or next(iter(self.models))

        # (metric, title, value): the task's metrics, then detection on average.
        metrics = self.models[model][DATA]
        rows = [(name, title, metrics.get(name)) for name, (title, _) in self._task.metrics.items()]
        if self.data_sets():
            for group in (*self._ood_groups(), None):
                average = self.average(model, group)
                for name in ("auroc", "fpr95", "aupr"):
                    title, _ = DETECTION[name]
                    rows.append((name, f"{title} ({_prefix(group)}OOD average)", average.get(name)))

        results = []
        for name, title, value in rows:
            if value is None or not math.isfinite(value):  # the metadata has no infinity
                continue
            results.append(
                EvalResult(
                    task_type=task_type,
                    dataset_type=dataset_type or dataset_name.lower().replace(" ", "-"),
                    dataset_name=dataset_name,
                    metric_type=name,
                    metric_name=title,
                    metric_value=round(value, 6),
                )
            )
        return results

    def plot(self, folder: str | os.PathLike) -> list[Path]:
        """Draw what the report has curves for into PNG files, and return their paths.

        These are reliability_diagram, risk_coverage, score_histograms, and for each OOD data set
        roc_NAME with all models.

        Args:
            folder (`str` or `os.PathLike`): where to write them.
        """
        from .._io.pictures import write_png
        from .report_plots import report_figures

        paths = []
        for name, figure in report_figures(self).items():
            paths.append(write_png(figure, Path(folder) / f"{name}.png"))
        return paths

    # Tables

    @property
    def _task(self) -> type[TaskFit]:
        return TASKS[self.task]

    def _ood_groups(self) -> list[str]:
        """Return the groups of OOD data sets; none where they were given without groups."""
        groups = []
        for group, *_ in self.groups.values():
            if group not in (ID, CORRUPTION, "OOD", *groups):
                groups.append(group)
        return groups

    def _main_sections(self) -> list[Section]:
        """Return what is shown where the report is printed."""
        number = 3 if self.promises else 2
        return self._sections()[:number]

    def _sections(self) -> list[Section]:
        """Return all tables, the main one first."""
        sections = self._sections_of_data()
        if self.promises:
            sections.append(section_of_promises(self.promises))
        if self.data_sets():
            sections.append(self._section_of_ood())
        if self.data_sets(CORRUPTION):
            sections.append(self._section_of_corruptions())
        return sections

    def _sections_of_data(self) -> list[Section]:
        """Return the main table, with detection on average, and the table of all other metrics."""
        metrics = self._task.metrics
        first = next(iter(metrics))
        main: dict[str, tuple[str, str]] = {first: metrics[first]}
        main |= {name: metrics[name] for name in metrics if name.startswith("answered")}
        details = {name: metrics[name] for name in metrics if name not in main}

        # Columns that are made of several results.
        made: dict[str, tuple[str, Mapping[str, float | None]]] = {}
        title, errors = self._errors_at_equal_coverage()
        if errors:
            made[title] = ("low", errors)
        groups: list[str | None] = list(self._ood_groups())
        if self.data_sets() and not groups:
            groups = [None]
        for group in groups:
            aurocs = {name: self.average(name, group).get("auroc") for name in self.models}
            made[f"{_prefix(group)}OOD AUROC"] = ("high", aurocs)
        rows: dict[str, dict[str, Any]] = {name: dict(self.models[name][DATA]) for name in self.models}
        for title, (better, values) in made.items():
            main[title] = (title, better)
            for name in self.models:
                rows[name][title] = values.get(name)
        members = {name: {"Members": str(self.num_members.get(name, NO_VALUE))} for name in self.models}

        # How the others differ from the first model.
        sentences = []
        if any(self.rows.values()):
            reference, *others = self.models
            for name in others:
                sentence = gain_sentence(name, reference, self.gains(name, reference))
                if sentence:
                    sentences.append(sentence)
        title_of_details = "Intervals and other metrics" if sentences else "Other metrics"
        return [
            (f"Results: {self._task.title}", [_table(rows, main, members)]),
            (title_of_details, [*sentences, _table(rows, details)]),
        ]

    def _about(self) -> list[str]:
        """Return sentences on data, rows, date and models."""
        sentences = []
        if self.about:
            name = self.about.get("data", "")
            data = f"Data: {name}, " if name else "Data: "
            rows = next(iter(self.models.values()))[DATA].get("num_samples", 0)
            sentences.append(
                f"{data}{rows:,.0f} rows. Evaluated on {self.about['date']} with hydra_transformers "
                f"{self.about['version']}."
            )
        for name, details in self.details.items():
            sentences.append(f"{name}: {details['model']}.")
        return sentences

    def _details(self) -> str:
        """Return what the page says of each model beside tables and plots, as HTML."""
        elements = []
        for name, details in self.details.items():
            prefix = f"{name}: " if len(self.details) > 1 else ""
            metrics = self.models[name][DATA]
            sections: list[Section] = []
            if details["promise"]:
                sections.append((f"{prefix}What was promised, and where it landed", self._landed(name)))
            if "reliability" in self.curves.get(name, {}):
                bins = bin_table(self.curves[name]["reliability"], int(metrics["num_samples"]))
                sections.append((f"{prefix}Confidence and accuracy", [bins]))
            if details.get("confusions"):
                title = f"{prefix}Pairs most often confused"
                sections.append((title, [confusion_table(details)]))
            if "classes" in details:
                sections.append((f"{prefix}By class, the least recognised first", [class_table(details)]))
            elements.append(to_html(sections))
            if details.get("surest_wrong"):
                elements.append(gallery_html(f"{prefix}Wrong, and most sure", details["surest_wrong"]))
            if details.get("least_sure"):
                elements.append(gallery_html(f"{prefix}Least sure", details["least_sure"]))
        return "\n".join(elements)

    def _landed(self, model: str) -> list[str | Table]:
        """Return what a model's calibration was asked for, where it landed, and what it said."""
        metrics = self.models[model][DATA]
        details = self.details[model]
        titles = {name: title for name, (title, _) in self._task.metrics.items()}
        parts: list[str | Table] = []
        table = landed_table(details.get("asked_for", ()), metrics, titles)
        if table is not None:
            parts.append(table)

        # Shares of which nothing was asked.
        in_table = {metric for asked in details.get("asked_for", ()) for metric in asked["metrics"]}
        results = []
        for name in PROMISED:
            if name in metrics and name in titles and name not in in_table:
                results.append(f"{titles[name].lower()} {100 * metrics[name]:.1f} %")
        if results:
            parts.append(f"On these {metrics['num_samples']:,.0f} rows: {', '.join(results)}.")
        parts.append(f"The calibration said: {' '.join(details['promise'])}")
        return parts

    def _errors_at_equal_coverage(self) -> tuple[str, Metrics]:
        """Return the error rates where all models answer as much as the one that answers least.

        Models that answer less make fewer errors, so their own thresholds do not compare them. With
        the title of that column.
        """
        curves = {name: parts["risk_coverage"] for name, parts in self.curves.items() if "risk_coverage" in parts}
        coverages = [self.models[name][DATA].get("answered") for name in curves]
        least = min((coverage for coverage in coverages if coverage), default=0.0)
        if len(coverages) < 2 or not least or set(coverages) == {least}:
            return "", {}
        errors = {}
        for name, curve in curves.items():
            errors[name] = float(np.interp(least, curve["coverage"], curve["risk"]))
        return f"Wrong at {100 * least:.3g} % answered", errors

    def _section_of_ood(self) -> Section:
        """Return the table of OOD data sets, one row for each, and their averages."""
        results = {}
        for name in self.data_sets():
            for model in self.models:
                results[model, name] = self.models[model][name]
        for group in (*self._ood_groups(), None):
            if len(self.data_sets(group)) > 1:
                for model in self.models:
                    results[model, f"{_prefix(group)}OOD average"] = self.average(model, group)
        explanation = f"Score: {self.score}. Averages are over data sets, each counting the same."
        return "Out of distribution", [explanation, _table_by_data_set(results, {**DETECTION, **self._task.metrics})]

    def _section_of_corruptions(self) -> Section:
        """Return the table of corrupted data, one row for each severity."""
        results = {}
        for model in self.models:
            for severity, metrics in self.severities(model).items():
                name = severity if severity == "average" else f"severity {severity}"
                results[model, name] = metrics
        names = dict.fromkeys(self.groups[name][1] for name in self.data_sets(CORRUPTION))
        explanation = f"Mean over the corruptions ({', '.join(names)}); average: mean over the severities."
        return "Under corruption", [explanation, _table_by_data_set(results, {**self._task.metrics, **SHIFT})]


def _mean(metrics: Sequence[Metrics]) -> Metrics:
    """Return the mean of each metric that all have."""
    if not metrics:
        return {}
    means = {}
    for name in metrics[0]:
        if name != "num_samples" and all(name in row for row in metrics):
            means[name] = math.fsum(row[name] for row in metrics) / len(metrics)
    return means


def _prefix(group: str | None) -> str:
    """Return how names of a group's averages begin."""
    if group is None:
        return ""
    return f"{group}-"


def _table_by_data_set(results: Mapping[tuple[str, str], Metrics], columns: Columns) -> Table:
    """Return a row for each model and data set."""
    texts = {key: {"Data": key[1]} for key in results}
    header, rows = _table(results, columns, texts)
    named_rows = []
    for (model, _), row in zip(results, rows, strict=True):
        named_rows.append([model, *row[1:]])
    return header, named_rows


def _table(
    results: Mapping[Any, Metrics], columns: Columns, texts: Mapping[Any, Mapping[str, str]] | None = None
) -> Table:
    """Return a row for each model, with the columns that one of them has.

    texts: what stands before the numbers, for each model title -> cell
    """
    if texts is None:
        texts = {key: {} for key in results}
    shown = [name for name in columns if any(row.get(name) is not None for row in results.values())]

    header = ["Model", *next(iter(texts.values()))]
    for name in shown:
        title, better = columns[name]
        if _is_share(name) and "%" not in title:
            title += " (%)"
        header.append(title + ARROWS[better])

    rows = []
    for key, metrics in results.items():
        numbers = [_text(name, metrics.get(name)) for name in shown]
        rows.append([str(key), *texts[key].values(), *numbers])
    return header, rows


def _is_share(metric: str) -> bool:
    """Whether a metric, or a column made of one, is shown in %."""
    return metric in SHARES or metric.endswith(("AUROC", "% answered"))


def _text(metric: str, value: float | None) -> str:
    """Write a value as a cell of a table."""
    if value is None or math.isnan(value):
        return NO_VALUE
    if _is_share(metric):
        return f"{100 * value:.2f}"
    return f"{value:.4g}"
