"""The results of models as tables, JSON, a page, card metadata and plots."""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io.files import parse_json, write_atomically
from .gains import Gain, gain_sentence, gains, unpacked_rows
from .rendering import html_page, to_html_parts, to_markdown, to_text
from .tables import Title, all_parts, cost_table, headline, legend, summary


if TYPE_CHECKING:
    import pandas
    from huggingface_hub import EvalResult

    from ..cost import Cost

Metrics = dict[str, float]


@dataclass(frozen=True)
class ModelResult:
    """What one model reached; every metric is a fraction or a number as its function defines it, not a percentage.

    Attributes:
        num_members: members of the ensemble; 1 for a plain model.
        id: metrics on the in-distribution data, and the means `total`, `aleatoric` of its uncertainty.
        ood: group (near, far) -> data set -> auroc, fpr95, aupr, mutual_information, disagreement, total, aleatoric.
        corruptions: corruption -> severity -> metrics on that data; with `shift_auroc`, how well the score tells it from the
            in-distribution data, and `ood_auroc`, how well it tells the OOD data from it, the mean over the OOD data sets.
        abstaining: `risk_at_100`, `risk_at_95`, `risk_at_90`: error rate among that share of the in-distribution rows, the
            most confident first. With a fitted `Abstention`, or of a calibrated model, also its `threshold`, and `coverage`
            and `risk` there; each OOD data set then has `refused`, the share of its rows above the threshold.
        sets: `alpha`, `coverage`, `mean_size` and `single_class` of fitted `ConformalSets`, or of a calibrated model's
            sets; else empty.
        curves: what `plot` draws: at most a few hundred points each.
        rows: a few numbers of each row, by which `gains` compares models row by row; packed, see `packed_rows`.
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


@dataclass(frozen=True, repr=False)
class UncertaintyReport:
    """The results of one or several models on the same data; printed, or shown by a notebook, its main tables.

    Attributes:
        score: the OOD score that was used, with the settings that are not the usual ones, see `detector_by_name`.
        models: name -> `ModelResult`.
    """

    score: str
    models: dict[str, ModelResult]

    def __str__(self) -> str:
        """The main table, detection by data set and what a threshold buys, for a terminal; a star marks the best."""
        return to_text(summary(self))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return to_html_parts(summary(self))

    def gains(self, model: str, other: str) -> dict[str, Gain]:
        """What one model gains over another, metric by metric, with 95 % intervals; see `gains`."""
        return gains(self._one_model(model), self._one_model(other))

    def gain_sentences(self) -> list[str]:
        """Each model against the first: better, worse, or no difference that these rows can show."""
        first, *others = self.models
        sentences = [gain_sentence(name, first, self.gains(name, first)) for name in others]
        return [sentence for sentence in sentences if sentence]

    def to_markdown(self) -> str:
        """The paper's tables; with several models the best is in bold, the second best underlined."""
        return to_markdown(all_parts(self))

    def to_html(
        self,
        path: str | os.PathLike | None = None,
        costs: "Mapping[str, Cost] | None" = None,
        pictures: Sequence[Path] | None = None,
    ) -> str:
        """A summary, all tables and plots as one page that needs no other file and no network; also written to `path`.

        Args:
            costs: what the models cost, from `compare_costs`: adds a table, and quality against cost.
            pictures: PNG files that `plot` wrote, which then are not drawn once more.
        """
        parts = [headline(self), *all_parts(self, in_words=True)]
        parts += [] if costs is None else [Title("Cost"), cost_table(costs)]
        parts += [Title("What the abbreviations mean"), legend()]
        if pictures is None:
            from .plots import report_pngs

            pngs = report_pngs(self, costs)
        else:
            pngs = {Path(picture).stem: Path(picture).read_bytes() for picture in pictures}
        page = html_page("Uncertainty report", [*parts, Title("Plots")], pngs)
        if path is not None:
            write_atomically(path, page)
        return page

    def to_pandas(self) -> "pandas.DataFrame":
        """A row for each model and data set: `model`, `members`, `group` (id, an OOD group, corruption), `data_set`,
        `severity` and a column for each metric, empty where it was not measured.

        What abstaining and prediction sets do stands in the rows of group id, as `abstaining_...` and `sets_...`."""
        import pandas

        return pandas.DataFrame([row for name, result in self.models.items() for row in _rows(name, result)])

    def to_json(self, path: str | os.PathLike | None = None) -> str:
        """The report as JSON text; also written to `path` where given. `from_json` reads it back, plots included."""
        text = json.dumps(_with_named_infinities(asdict(self)), indent=1, allow_nan=False) + "\n"
        if path is not None:
            write_atomically(path, text)
        return text

    @classmethod
    def from_json(cls, path: str | os.PathLike) -> "UncertaintyReport":
        """Read a report that `to_json(path)` wrote."""
        try:
            content = _without_named_infinities(parse_json(Path(path).read_bytes()))
            models = {name: ModelResult(**result) for name, result in content["models"].items()}
            for result in models.values():
                unpacked_rows(result.rows)  # broken ones are found here, not when the report is printed
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

        result = self._one_model(model)
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
            for metric_type, metric_name, value in _named_results(result)
        ]

    def _one_model(self, model: str | None) -> ModelResult:
        if model is None and len(self.models) > 1:
            raise ValueError(f"the report has {len(self.models)} models: pass model= one of {', '.join(self.models)}")
        if model is not None and model not in self.models:
            raise ValueError(f"the report has no model {model!r}: pass one of {', '.join(self.models)}")
        return self.models[model if model is not None else next(iter(self.models))]

    def plot(self, folder: str | os.PathLike, costs: "Mapping[str, Cost] | None" = None) -> list[Path]:
        """Draw the report into PNG files in `folder`, and return their paths.

        reliability_diagram, risk_coverage and uncertainty_split; with OOD data also score_histograms, and for each data set
        roc_NAME_GROUP with all models; with corrupted data also severity_curves and accuracy_by_corruption.

        Args:
            costs: what the models cost, from `compare_costs`: adds quality_against_cost.
        """
        from .plots import draw_report

        return draw_report(self, folder, costs)


def _rows(name: str, result: ModelResult) -> list[dict[str, Any]]:
    """One model's, see `UncertaintyReport.to_pandas`."""
    model = {"model": name, "members": result.num_members}
    decisions = {"abstaining": result.abstaining, "sets": result.sets}
    decided = {f"{kind}_{key}": value for kind, found in decisions.items() for key, value in found.items()}
    rows = [model | {"group": "id", "data_set": None, "severity": None} | result.id | decided]
    for group, data_sets in result.ood.items():
        rows += [model | {"group": group, "data_set": each} | found for each, found in data_sets.items()]
    for corruption, sweep in result.corruptions.items():
        place = model | {"group": "corruption", "data_set": corruption}
        rows += [place | {"severity": severity} | found for severity, found in sweep.items()]
    return rows


def _named_results(result: ModelResult) -> list[tuple[str, str, float]]:
    names = {
        "accuracy": "Accuracy",
        "brier": "Brier score",
        "nll": "Negative log-likelihood",
        "ece": "Expected calibration error",
        "aece": "Adaptive calibration error",
        "aurc": "Area under the risk-coverage curve",
        "mutual_information": "Mutual information of the members",
        "disagreement": "Disagreement of the members",
    }
    found = [(metric, name, result.id[metric]) for metric, name in names.items()]
    averages = {f"{group}-OOD average": result.ood_average(group) for group in result.ood}
    if result.ood:
        averages["OOD average"] = result.ood_average()
    for where, metrics in averages.items():
        found += [(metric, f"{metric.upper()} ({where})", metrics[metric]) for metric in ("auroc", "fpr95", "aupr")]
    return found


def _mean_metrics(metrics: list[Metrics]) -> Metrics:
    if not metrics:
        return {}
    return {
        name: math.fsum(entry[name] for entry in metrics) / len(metrics)
        for name in metrics[0]
        if name != "num_samples" and all(name in entry for entry in metrics)
    }


def _severity_order(severity: str) -> tuple[int, float, str]:
    try:
        return 0, float(severity), severity
    except ValueError:
        return 1, 0.0, severity


def _with_named_infinities(content: Any) -> Any:
    """JSON has no infinity: write it as a string."""
    if isinstance(content, dict):
        return {name: _with_named_infinities(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_with_named_infinities(value) for value in content]
    return str(content) if isinstance(content, float) and math.isinf(content) else content


def _without_named_infinities(content: Any) -> Any:
    if isinstance(content, dict):
        return {name: _without_named_infinities(value) for name, value in content.items()}
    if isinstance(content, list):
        return [_without_named_infinities(value) for value in content]
    return float(content) if content in ("inf", "-inf") else content
