"""A report as the paper's tables: titles, sentences and tables, which `rendering.py` writes down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cost import Cost, readable_count
from ..uncertainty.abstention import what_it_buys
from .table import NO_VALUE, Cell, Table


if TYPE_CHECKING:
    from .report import ModelResult, UncertaintyReport


@dataclass(frozen=True)
class Column:
    """How a metric is shown: its title, which way is better (None: neither), as a percentage or not, its decimals."""

    title: str
    higher_is_better: bool | None
    percent: bool = False
    decimals: int = 2

    def heading(self, place: str = "") -> str:
        arrow = {True: "↑", False: "↓", None: ""}[self.higher_is_better]
        return f"{place} {self.title} {arrow}".strip()

    def text(self, value: float | None) -> str:
        return NO_VALUE if value is None else f"{100 * value if self.percent else value:.{self.decimals}f}"


@dataclass(frozen=True)
class Title:
    """level: 2 for a part of the report, 3 for a part of a part."""

    text: str
    level: int = 2


Part = Title | str | Table

COLUMNS = {
    "accuracy": Column("Acc", higher_is_better=True, percent=True),
    "brier": Column("Brier", higher_is_better=False, decimals=3),
    "nll": Column("NLL", higher_is_better=False, decimals=3),
    "ece": Column("ECE", higher_is_better=False, decimals=4),
    "aece": Column("aECE", higher_is_better=False, decimals=4),
    "aurc": Column("AURC", higher_is_better=False, decimals=4),
    "auroc": Column("AUROC", higher_is_better=True, percent=True),
    "fpr95": Column("FPR95", higher_is_better=False, percent=True),
    "aupr": Column("AUPR", higher_is_better=True, percent=True),
    "mutual_information": Column("MI", higher_is_better=True, decimals=4),
    "disagreement": Column("DI", higher_is_better=True, decimals=4),
    "risk_at_100": Column("risk at 100 %", higher_is_better=False, percent=True),
    "risk_at_95": Column("risk at 95 %", higher_is_better=False, percent=True),
    "risk_at_90": Column("risk at 90 %", higher_is_better=False, percent=True),
    "ood_auroc": Column("OOD AUROC", higher_is_better=True, percent=True),
    # Neither way is better: who still answers right has no reason to doubt.
    "shift_auroc": Column("AUROC against clean", higher_is_better=None, percent=True),
    # Neither way is better: a threshold trades these for one another, and an alpha is chosen.
    "coverage": Column("coverage", higher_is_better=None, percent=True),
    "risk": Column("risk", higher_is_better=None, percent=True),
    "refused": Column("refused", higher_is_better=None, percent=True),
    "alpha": Column("alpha", higher_is_better=None, percent=True),
    "mean_size": Column("mean size", higher_is_better=False),
    "single_class": Column("single-class sets", higher_is_better=True, percent=True),
}
CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece", "aurc")
DETECTION = ("auroc", "fpr95", "aupr")
UNDER_CORRUPTION = (*CLASSIFICATION, "ood_auroc", "shift_auroc")
DIVERSITY = ("mutual_information", "disagreement")
ABSTAINING = ("risk_at_100", "risk_at_95", "risk_at_90")
SETS = ("alpha", "coverage", "mean_size", "single_class")
IN_DISTRIBUTION = ("", CLASSIFICATION, lambda result: result.id)


def summary(report: "UncertaintyReport") -> list[Part]:
    """What is asked first: how good the answers are, how well each data set is told, what a threshold buys."""
    first = next(iter(report.models.values()))
    parts: list[Part] = [Title("In distribution", level=3), _table(report, [IN_DISTRIBUTION], with_members=True)]
    if first.ood:
        sets = [(group, name) for group, data_sets in first.ood.items() for name in data_sets]
        places = [(f"{name} ({group})", ("auroc",), _data_set(group, name)) for group, name in sets]
        places.append(("average", ("auroc", "fpr95"), lambda result: result.ood_average()))
        by_set, names = _table(report, places), [f"{name} ({group}) ↑" for group, name in sets]
        title = Title(f"OOD detection: AUROC by data set, score {report.score}", level=3)
        parts += [title, Table(["Model", *names, *by_set.header[-2:]], by_set.rows)]
    parts += _differences(report, level=3)
    if any("threshold" in result.abstaining for result in report.models.values()):
        parts += [Title("Abstaining", level=3), *_what_abstaining_buys(report)]
    return parts


def all_parts(report: "UncertaintyReport") -> list[Part]:
    """All that a report has data for."""
    first = next(iter(report.models.values()))
    average = ("OOD avg", DETECTION, lambda result: result.ood_average())
    main = [IN_DISTRIBUTION, *([average] if first.ood else [])]
    parts: list[Part] = [
        Title("In distribution and on average out of distribution"),
        _table(report, main, with_members=True),
    ]
    parts += _differences(report)
    if first.ood:
        told = f"Score: {report.score}. Averages are over data sets, each counting the same."
        averages = [(f"{group}-OOD avg", DETECTION, _group_average(group)) for group in first.ood]
        parts += [Title("OOD detection"), told, _table(report, [*averages, average])]
    for group, data_sets in first.ood.items():
        places = [(name, DETECTION, _data_set(group, name)) for name in data_sets]
        parts += [Title(f"{group}-OOD", level=3), _table(report, places)]
    if any(result.num_members > 1 for result in report.models.values()):
        places = [("ID", DIVERSITY, _diversity(lambda result: result.id))]
        if first.ood:
            places.append(("OOD avg", DIVERSITY, _diversity(lambda result: result.ood_average())))
        parts += [Title("Diversity of the members"), _table(report, places)]
    return parts + _decision_tables(report) + _corruption_tables(report)


def _differences(report: "UncertaintyReport", level: int = 2) -> list[Part]:
    """Which differences are more than chance, each model against the first."""
    sentences = report.gain_sentences()
    return [Title("What these rows can show", level), *sentences] if sentences else []


def _decision_tables(report: "UncertaintyReport") -> list[Part]:
    """What abstaining buys, and the prediction sets; reports from before these were have neither."""
    results, parts = report.models.values(), []
    if any(result.abstaining for result in results):
        places = [("", ABSTAINING, lambda result: result.abstaining)]
        if any("threshold" in result.abstaining for result in results):
            places.append(("threshold:", ("coverage", "risk"), lambda result: result.abstaining))
            sets = [(group, name) for group, found in next(iter(results)).ood.items() for name in found]
            places += [(f"threshold: {name}", ("refused",), _data_set(group, name)) for group, name in sets]
            if len(sets) > 1:
                places.append(("threshold: OOD avg", ("refused",), lambda result: result.ood_average()))
        told = (
            "Risk: error rate among the answers. At 90 %: where only the most confident 90 % of the rows are answered."
        )
        parts += [Title("Abstaining"), told, _table(report, places), *_what_abstaining_buys(report)]
    if any(result.sets for result in results):
        told = "Sets of classes that should hold the right one for all but alpha of the rows."
        parts += [Title("Prediction sets"), told, _table(report, [("", SETS, lambda result: result.sets)])]
    return parts


def _what_abstaining_buys(report: "UncertaintyReport") -> list[str]:
    return [f"{name}: {_bought(result.abstaining)}." for name, result in report.models.items()]


def _bought(abstaining: dict[str, float | None]) -> str:
    if "threshold" in abstaining:
        bought = what_it_buys(abstaining["coverage"], abstaining["risk"], abstaining["risk_at_100"])
        return f"at the threshold, {bought}"
    if not abstaining:
        return "not measured"
    return what_it_buys(0.9, abstaining["risk_at_90"], abstaining["risk_at_100"])


def _corruption_tables(report: "UncertaintyReport") -> list[Part]:
    first = next(iter(report.models.values()))
    severities = list(first.severity_averages())
    if not severities:
        return []
    names = ", ".join(first.corruptions)
    averages = first.corruption_average()
    told = f"Mean over the corruptions ({names}); average: mean over the severities."
    if "ood_auroc" in averages:
        told += " OOD AUROC: the OOD data told from the corrupted data."
    if "shift_auroc" in averages:
        told += " AUROC against clean: the corrupted data told from the in-distribution data."
    parts: list[Part] = [Title("Under corruption"), told]
    for metric in (each for each in UNDER_CORRUPTION if each in averages):
        places = [("clean", (metric,), clean)] if metric != "shift_auroc" else []
        places += [(f"sev{severity}", (metric,), _severity(severity)) for severity in severities]
        parts.append(_table(report, [*places, ("average", (metric,), lambda result: result.corruption_average())]))
    if len(first.corruptions) > 1:
        places = [(name, ("accuracy",), _corruption(name)) for name in first.corruptions]
        parts += [Title("By corruption, mean over the severities", level=3), _table(report, places)]
    return parts


def clean(result: "ModelResult") -> dict[str, float]:
    """Severity 0."""
    return result.id | ({"ood_auroc": result.ood_average()["auroc"]} if result.ood else {})


def _corruption(name: str) -> Callable:
    return lambda result: result.corruption_averages()[name]


def _group_average(group: str) -> Callable:
    return lambda result: result.ood_average(group)


def _data_set(group: str, name: str) -> Callable:
    return lambda result: result.ood[group][name]


def _severity(severity: str) -> Callable:
    return lambda result: result.severity_averages()[severity]


def _diversity(read: Callable) -> Callable:
    """A single model has no members to differ: its cells stay empty."""
    return lambda result: read(result) if result.num_members > 1 else {}


def _table(
    report: "UncertaintyReport", places: list[tuple[str, tuple, Callable]], with_members: bool = False
) -> Table:
    results = list(report.models.values())
    header, columns = ["Model"], [list(report.models)]
    if with_members:
        header.append("Members")
        columns.append([str(result.num_members) for result in results])
    for place, metrics, read in places:
        for metric in metrics:
            header.append(COLUMNS[metric].heading(place))
            columns.append(_ranked([read(result).get(metric) for result in results], COLUMNS[metric]))
    return Table(header, list(zip(*columns, strict=True)))


def _ranked(values: list[float | None], column: Column) -> list[Cell]:
    """The best and the second best, judged by the digits shown, so that what looks equal is marked equal."""
    texts = [column.text(value) for value in values]
    shown = sorted({float(text) for text in texts if text != NO_VALUE}, reverse=bool(column.higher_is_better))
    if len(texts) < 2 or column.higher_is_better is None:
        return [Cell(text) for text in texts]
    marks = dict(zip(shown, ("bold", "underline"), strict=False))
    return [Cell(text, "" if text == NO_VALUE else marks.get(float(text), "")) for text in texts]


def cost_table(costs: Mapping[str, Cost]) -> Table:
    """What `compare_costs` found; times also as a multiple of the first row's."""
    first = next(iter(costs.values()))
    header = ["Model", "Parameters", "Multiply-adds", *(f"ms, batch {size}" for size in first.milliseconds)]
    rows = []
    for name, cost in costs.items():
        times = [f"{value:.2f} ({value / first.milliseconds[size]:.2f}x)" for size, value in cost.milliseconds.items()]
        rows.append([name, f"{cost.parameters:,}", readable_count(cost.multiply_adds), *times])
    return Table(header, rows)
