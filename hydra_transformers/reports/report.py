"""The results of models, and the report on them: tables, JSON, a page, card metadata and plots."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io.files import parse_json, write_atomically
from .gains import Gain, gain_sentence, gains, map_leaves, unpacked_rows
from .report_tables import DETECTION, ReportTables, cost_table, headline, legend
from .table import Title, html_page, to_html, to_markdown, to_text


if TYPE_CHECKING:
    import pandas
    from huggingface_hub import EvalResult

    from ..cost import Cost

Metrics = dict[str, float]
METRIC_NAMES = {  # in the metadata of cards
    "accuracy": "Accuracy",
    "brier": "Brier score",
    "nll": "Negative log-likelihood",
    "ece": "Expected calibration error",
    "aece": "Adaptive calibration error",
    "aurc": "Area under the risk-coverage curve",
    "mutual_information": "Mutual information of the members",
    "disagreement": "Disagreement of the members",
}


@dataclass(frozen=True)
class ModelResult:
    """The results of one model. Every metric is a fraction or a number as its function defines it, not a percentage.

    Attributes:
        num_members: members of the ensemble; 1 for a plain model.
        id: metrics on the in-distribution data, and the means `total` and `aleatoric` of its uncertainty.
        ood: group (near, far) -> data set -> auroc, fpr95, aupr, mutual_information, disagreement, total, aleatoric; and
            energy_auroc, by the energy of the logits, where that is not the report's score.
        corruptions: corruption -> severity -> metrics on that data; with `shift_auroc`, how well the score tells it from the
            in-distribution data, and `ood_auroc`, how well it tells the OOD data from it, the mean over the OOD data sets.
        curves: the curves that `plot` draws, at most a few hundred points each.
        abstaining: `risk_at_100`, `risk_at_95`, `risk_at_90`: error rate among that share of the in-distribution rows, the
            most confident first. With a fitted `Abstention`, or for a calibrated model, also its `threshold`, and `coverage`
            and `risk` there; each OOD data set then has `refused`, the share of its rows above the threshold.
        sets: `alpha`, `coverage`, `mean_size` and `single_class` of fitted `ConformalSets`, or of a calibrated model's
            sets; otherwise empty.
        rows: a few numbers per row, packed, from which `gains` compares models row by row.
    """

    num_members: int
    id: Metrics
    ood: dict[str, dict[str, Metrics]] = field(default_factory=dict)
    corruptions: dict[str, dict[str, Metrics]] = field(default_factory=dict)
    curves: dict[str, Any] = field(default_factory=dict, repr=False)
    abstaining: dict[str, float | None] = field(default_factory=dict)
    sets: Metrics = field(default_factory=dict)
    rows: dict[str, Any] = field(default_factory=dict, repr=False)

    def ood_average(self, group: str | None = None) -> Metrics:
        """Mean over the data sets of one group; without a group over all data sets, each counting the same (the paper's
        OOD Avg: not the mean of the near and the far average, and not weighted by the number of samples)."""
        groups = self.ood.values() if group is None else [self.ood[group]]
        return _mean_metrics([metrics for data_sets in groups for metrics in data_sets.values()])

    def severity_averages(self) -> dict[str, Metrics]:
        """Severity -> mean over the corruptions that have it, as in ImageNet-C."""
        severities = sorted(set(chain.from_iterable(self.corruptions.values())), key=_severity_order)
        return {
            severity: _mean_metrics([sweep[severity] for sweep in self.corruptions.values() if severity in sweep])
            for severity in severities
        }

    def corruption_averages(self) -> dict[str, Metrics]:
        """Corruption -> mean over its severities."""
        return {corruption: _mean_metrics(list(sweep.values())) for corruption, sweep in self.corruptions.items()}

    def corruption_average(self) -> Metrics:
        """Mean over the severities of `severity_averages`, as in the paper's tables 13 and 14; empty without corruptions."""
        return _mean_metrics(list(self.severity_averages().values()))


def _mean_metrics(metrics: list[Metrics]) -> Metrics:
    common = [name for name in metrics[0] if all(name in each for each in metrics)] if metrics else []
    return {name: math.fsum(each[name] for each in metrics) / len(metrics) for name in common if name != "num_samples"}


def _severity_order(severity: str) -> tuple[int, float, str]:
    """Numbers first, in their order, then names."""
    try:
        return 0, float(severity), severity
    except ValueError:
        return 1, 0.0, severity


@dataclass(frozen=True, repr=False)
class UncertaintyReport:
    """The results of one or several models on the same data. Printed or shown in a notebook: its main tables.

    Attributes:
        score: the OOD score, with the settings that are not the usual ones, see `detector_by_name`.
        models: name -> `ModelResult`.
    """

    score: str
    models: dict[str, ModelResult]

    def __str__(self) -> str:
        """The main table, detection by data set and what a threshold buys, for a terminal; a star marks the best."""
        return to_text(ReportTables(self).summary())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html(ReportTables(self).summary())

    def gains(self, model: str, other: str) -> dict[str, Gain]:
        """What one model gains over another, metric by metric, with 95 % intervals; see `gains`."""
        return gains(self._result(model), self._result(other))

    def gain_sentences(self) -> list[str]:
        """Each model against the first: better, worse, or no difference that these rows can show."""
        first, *others = self.models
        sentences = [gain_sentence(name, first, self.gains(name, first)) for name in others]
        return [sentence for sentence in sentences if sentence]

    def to_markdown(self) -> str:
        """The paper's tables; with several models the best is in bold, the second best underlined."""
        return to_markdown(ReportTables(self).all())

    def to_html(
        self,
        path: str | os.PathLike | None = None,
        costs: "Mapping[str, Cost] | None" = None,
        pictures: Sequence[Path] | None = None,
    ) -> str:
        """A summary, all tables and plots as one page that needs no other file and no network; also written to `path`.

        Args:
            costs: the models' costs, from `compare_costs`: adds a table, and quality against cost.
            pictures: PNG files that `plot` wrote, to use instead of drawing them again.
        """
        parts = [headline(self), *ReportTables(self, in_words=True).all()]
        parts += [] if costs is None else [Title("Cost"), cost_table(costs)]
        parts += [Title("What the abbreviations mean"), legend(), Title("Plots")]
        if pictures is None:
            from .report_plots import report_pngs

            pngs = report_pngs(self, costs)
        else:
            pngs = {Path(picture).stem: Path(picture).read_bytes() for picture in pictures}
        page = html_page("Uncertainty report", parts, pngs)
        if path is not None:
            write_atomically(path, page)
        return page

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each model and data set: `model`, `members`, `group` (id, an OOD group, corruption), `data_set`,
        `severity` and a column for each metric, empty where it was not measured. The rows of group id also hold
        `abstaining_...` and `sets_...`."""
        import pandas

        rows = []
        for name, result in self.models.items():
            model = {"model": name, "members": result.num_members}
            decided = {f"abstaining_{key}": value for key, value in result.abstaining.items()}
            decided |= {f"sets_{key}": value for key, value in result.sets.items()}
            rows.append(model | {"group": "id", "data_set": None, "severity": None} | result.id | decided)
            for group, sets in result.ood.items():
                rows += [model | {"group": group, "data_set": each} | found for each, found in sets.items()]
            for corruption, sweep in result.corruptions.items():
                place = model | {"group": "corruption", "data_set": corruption}
                rows += [place | {"severity": severity} | found for severity, found in sweep.items()]
        return pandas.DataFrame(rows)

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """The report as JSON text; also written to `path` where given. `from_json` reads it back, plots included."""
        # JSON has no infinity: it becomes a string.
        content = map_leaves(asdict(self), lambda v: str(v) if isinstance(v, float) and math.isinf(v) else v)
        text = json.dumps(content, indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "UncertaintyReport":
        """Reads a report that `to_json(path)` wrote."""
        try:
            content = parse_json(Path(path).read_bytes())
            content = map_leaves(content, lambda value: float(value) if value in ("inf", "-inf") else value)
            models = {name: ModelResult(**result) for name, result in content["models"].items()}
            for result in models.values():
                unpacked_rows(result.rows)  # broken rows fail here, not when the report is printed
            return cls(score=content["score"], models=models)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not an uncertainty report: pass a file that to_json wrote") from error

    def to_eval_results(
        self,
        dataset_name: str,
        dataset_type: str | None = None,
        model: str | None = None,
        task_type: str = "image-classification",
        dataset_split: str | None = None,
    ) -> "list[EvalResult]":
        """One model's results as metadata of its card: `ModelCardData(model_name=..., eval_results=...)`.

        Args:
            dataset_name: the in-distribution data, as people call it ("CIFAR-100").
            dataset_type: its id on the Hub ("cifar100"); made from the name where not given.
            model: which model; needed when the report has several.
        """
        from huggingface_hub import EvalResult

        result = self._result(model)
        found = [(metric, name, result.id[metric]) for metric, name in METRIC_NAMES.items()]
        averages = {f"{group}-OOD average": result.ood_average(group) for group in result.ood}
        averages |= {"OOD average": result.ood_average()} if result.ood else {}
        for where, metrics in averages.items():
            found += [(metric, f"{metric.upper()} ({where})", metrics[metric]) for metric in DETECTION]
        return [
            EvalResult(
                task_type=task_type,
                dataset_type=dataset_type or dataset_name.lower().replace(" ", "-"),
                dataset_name=dataset_name,
                dataset_split=dataset_split,
                metric_type=metric_type,
                metric_name=metric_name,
                metric_value=round(value, 6),
            )
            for metric_type, metric_name, value in found
        ]

    def _result(self, model: str | None) -> ModelResult:
        if model is None and len(self.models) > 1:
            raise ValueError(f"the report has {len(self.models)} models: pass model= one of {', '.join(self.models)}")
        if model is not None and model not in self.models:
            raise ValueError(f"the report has no model {model!r}: pass one of {', '.join(self.models)}")
        return self.models[model if model is not None else next(iter(self.models))]

    def plot(self, folder: str | os.PathLike, costs: "Mapping[str, Cost] | None" = None) -> list[Path]:
        """Draws the report into PNG files in `folder`, and returns their paths.

        reliability_diagram, risk_coverage and uncertainty_split; with OOD data also score_histograms, and for each data set
        roc_NAME_GROUP with all models; with corrupted data also severity_curves and accuracy_by_corruption.

        Args:
            costs: the models' costs, from `compare_costs`: adds quality_against_cost.
        """
        from .report_plots import report_figures, write_figures

        return write_figures(report_figures(self, costs), folder)
