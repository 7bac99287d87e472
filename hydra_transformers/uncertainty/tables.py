"""A report as the paper's tables, in markdown."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from .report import ModelResult, UncertaintyReport


NO_VALUE = "-"


@dataclass(frozen=True)
class Column:
    """How a metric is shown: its title, which way is better, as a percentage or not, with how many decimals."""

    title: str
    higher_is_better: bool
    percent: bool = False
    decimals: int = 2

    def heading(self, place: str = "") -> str:
        return f"{place} {self.title} {'↑' if self.higher_is_better else '↓'}".strip()

    def text(self, value: float | None) -> str:
        return NO_VALUE if value is None else f"{100 * value if self.percent else value:.{self.decimals}f}"


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
}
CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece", "aurc")
DETECTION = ("auroc", "fpr95", "aupr")
DIVERSITY = ("mutual_information", "disagreement")


def markdown_tables(report: "UncertaintyReport") -> str:
    """All tables of a report that it has data for."""
    first = next(iter(report.models.values()))
    average = ("OOD avg", lambda result: result.ood_average())
    main = [("", CLASSIFICATION, lambda result: result.id)]
    if first.ood:
        main.append((average[0], DETECTION, average[1]))
    parts = ["## In distribution and on average out of distribution", _table(report, main, with_members=True)]
    if first.ood:
        parts += ["## OOD detection", f"Score: {report.score}. Averages are over data sets, each counting the same."]
        averages = [(f"{group}-OOD avg", _group_average(group)) for group in first.ood]
        parts.append(_table(report, [(place, DETECTION, read) for place, read in [*averages, average]]))
    for group, data_sets in first.ood.items():
        parts += [f"### {group}-OOD"]
        parts.append(_table(report, [(name, DETECTION, _data_set(group, name)) for name in data_sets]))
    if any(result.num_members > 1 for result in report.models.values()):
        places = [("ID", DIVERSITY, _diversity(lambda result: result.id))]
        if first.ood:
            places.append((average[0], DIVERSITY, _diversity(average[1])))
        parts += ["## Diversity of the members", _table(report, places)]
    parts += _corruption_tables(report)
    return "\n\n".join(parts) + "\n"


def _corruption_tables(report: "UncertaintyReport") -> list[str]:
    first = next(iter(report.models.values()))
    severities = list(first.severity_averages())
    if not severities:
        return []
    names = ", ".join(first.corruptions)
    parts = ["## Under corruption", f"Mean over the corruptions ({names}); average: mean over the severities."]
    for metric in CLASSIFICATION:
        places = [(f"sev{severity}", (metric,), _severity(severity)) for severity in severities]
        parts.append(_table(report, [*places, ("average", (metric,), _over_severities)]))
    return parts


def _group_average(group: str) -> Callable:
    return lambda result: result.ood_average(group)


def _data_set(group: str, name: str) -> Callable:
    return lambda result: result.ood[group][name]


def _severity(severity: str) -> Callable:
    return lambda result: result.severity_averages()[severity]


def _over_severities(result: "ModelResult") -> dict[str, float]:
    averages = list(result.severity_averages().values())
    return {metric: math.fsum(entry[metric] for entry in averages) / len(averages) for metric in CLASSIFICATION}


def _diversity(read: Callable) -> Callable:
    """A single model has no members to differ: its cells stay empty."""
    return lambda result: read(result) if result.num_members > 1 else {}


def _table(report: "UncertaintyReport", places: list[tuple[str, tuple, Callable]], with_members: bool = False) -> str:
    names, results = list(report.models), list(report.models.values())
    headings = ["Model"] + (["Members"] if with_members else [])
    columns = [[_escaped(name) for name in names]]
    if with_members:
        columns.append([str(result.num_members) for result in results])
    for place, metrics, read in places:
        for metric in metrics:
            headings.append(_escaped(COLUMNS[metric].heading(place)))
            columns.append(_marked([read(result).get(metric) for result in results], COLUMNS[metric]))
    alignment = ["---"] + ["--:"] * (len(headings) - 1)
    return "\n".join("| " + " | ".join(row) + " |" for row in [headings, alignment, *zip(*columns, strict=True)])


def _marked(values: list[float | None], column: Column) -> list[str]:
    """Best in bold, second best underlined, judged by the digits shown, so that what looks equal is marked equal."""
    texts = [column.text(value) for value in values]
    shown = sorted({float(text) for text in texts if text != NO_VALUE}, reverse=column.higher_is_better)
    if len(texts) < 2 or len(shown) == 0:
        return texts
    marks = {shown[0]: "**{}**"} | ({shown[1]: "<u>{}</u>"} if len(shown) > 1 else {})
    return [marks.get(float(text), "{}").format(text) if text != NO_VALUE else text for text in texts]


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")
