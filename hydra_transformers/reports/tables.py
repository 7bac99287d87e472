"""The parts of an uncertainty report: titles, sentences and tables, which `rendering.py` writes down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cost import Cost, readable_count
from ..uncertainty.abstention import what_it_buys
from .table import NO_VALUE, Cell, Table


if TYPE_CHECKING:
    from .report import Metrics, ModelResult, UncertaintyReport


@dataclass(frozen=True)
class Column:
    """How a metric is shown: its title, which way is better (None: neither), as a percentage or not, its decimals.

    words: the title on a page, where there is room
    meaning: for the legend of the page; "" where the words say it
    """

    title: str
    higher_is_better: bool | None
    percent: bool = False
    decimals: int = 2
    words: str = ""
    meaning: str = ""

    def heading(self, place: str = "", in_words: bool = False) -> str:
        arrow = {True: "↑", False: "↓", None: ""}[self.higher_is_better]
        if not in_words:
            return f"{place} {self.title} {arrow}".strip()
        unit = " (%)" if self.percent and "%" not in self.title else ""
        return f"{place} {self.words or self.title}{unit}\N{NO-BREAK SPACE}{arrow}".strip()

    def text(self, value: float | None) -> str:
        return NO_VALUE if value is None else f"{100 * value if self.percent else value:.{self.decimals}f}"


@dataclass(frozen=True)
class Title:
    """level: 2 for a part of the report, 3 for a part of a part."""

    text: str
    level: int = 2


Part = Title | str | Table

COLUMNS = {
    "accuracy": Column("Acc", True, percent=True, words="Accuracy"),
    "brier": Column("Brier", False, decimals=3, words="Brier score"),
    "nll": Column("NLL", False, decimals=3, meaning="Negative log-likelihood of the right class, in nats."),
    "ece": Column(
        "ECE", False, decimals=4, meaning="Expected calibration error: how far confidence lies from accuracy."
    ),
    "aece": Column("aECE", False, decimals=4, meaning="Adaptive ECE: the same over bins with equally many rows."),
    "aurc": Column(
        "AURC",
        False,
        decimals=4,
        meaning="Area under the risk-coverage curve: the error rate, averaged over all shares of the rows that may be "
        "answered, the most confident first.",
    ),
    "auroc": Column(
        "AUROC",
        True,
        percent=True,
        meaning="How often a foreign row gets a higher score than a known one; 50 is chance.",
    ),
    "fpr95": Column(
        "FPR95", False, percent=True, meaning="Share of known rows refused where 95 % of the foreign ones are."
    ),
    "aupr": Column("AUPR", True, percent=True, meaning="Average precision of telling foreign rows from known ones."),
    "mutual_information": Column(
        "MI",
        True,
        decimals=4,
        words="Mutual information (MI)",
        meaning="Mutual information, in nats: the part of the uncertainty that comes from members that disagree.",
    ),
    "disagreement": Column(
        "DI",
        True,
        decimals=4,
        words="Disagreement (DI)",
        meaning="Disagreement: the share of pairs of members that name different classes.",
    ),
    "risk_at_100": Column("risk at 100 %", False, percent=True),
    "risk_at_95": Column("risk at 95 %", False, percent=True),
    "risk_at_90": Column("risk at 90 %", False, percent=True),
    "ood_auroc": Column("OOD AUROC", True, percent=True),
    # Neither way is better: who still answers right has no reason to doubt.
    "shift_auroc": Column("AUROC against clean", None, percent=True),
    # Neither way is better: a threshold trades these for one another, and an alpha is chosen.
    "coverage": Column("coverage", None, percent=True),
    "risk": Column("risk", None, percent=True),
    "refused": Column("refused", None, percent=True),
    "alpha": Column("alpha", None, percent=True),
    "mean_size": Column("mean size", False),
    "single_class": Column("single-class sets", True, percent=True),
}
CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece", "aurc")
DETECTION = ("auroc", "fpr95", "aupr")
DIVERSITY = ("mutual_information", "disagreement")
UNDER_CORRUPTION = (*CLASSIFICATION, "ood_auroc", "shift_auroc")
ABSTAINING = ("risk_at_100", "risk_at_95", "risk_at_90")
SETS = ("alpha", "coverage", "mean_size", "single_class")

# Where metrics are read, which ones, and how they are read from a `ModelResult`.
Place = tuple[str, tuple[str, ...], Callable[["ModelResult"], "Metrics"]]
IN_DISTRIBUTION: Place = ("", CLASSIFICATION, lambda result: result.id)
OOD_AVERAGE: Place = ("OOD avg", DETECTION, lambda result: result.ood_average())


def headline(report: "UncertaintyReport") -> str:
    """What a page says first: how many rows, how often they are answered right, and which differences are real."""
    first = next(iter(report.models.values()))
    sets = sum(map(len, first.ood.values()))
    rows = f"{first.id['num_samples']:,} rows"
    if len(report.models) == 1:
        said = f"{next(iter(report.models))} answers {first.id['accuracy']:.1%} of {rows} right"
        if sets:
            auroc = f"an AUROC of {first.ood_average()['auroc']:.1%}"
            said += f", and tells {_foreign(sets)} from known data with {auroc} (score {report.score})"
        return f"{said}."
    right = ", ".join(f"{name} {result.id['accuracy']:.1%}" for name, result in report.models.items())
    data = f"{rows} and {_foreign(sets)}" if sets else rows
    return " ".join([f"{len(report.models)} models on {data}; right answers: {right}.", *report.gain_sentences()])


def _foreign(sets: int) -> str:
    return f"{sets} sets of foreign data" if sets > 1 else "foreign data"


def legend() -> Table:
    """What the abbreviations of a page mean."""
    rows = [
        [
            "OOD",
            "Out of distribution: data of another kind than the model was made for; near resembles it, far does not.",
        ]
    ]
    rows += [[column.title, column.meaning] for column in COLUMNS.values() if column.meaning]
    return Table(["Short", "Meaning"], rows, "ll")


def summary(report: "UncertaintyReport") -> list[Part]:
    """The main tables: quality of the answers, detection by data set, and what a threshold buys."""
    first = next(iter(report.models.values()))
    parts: list[Part] = [Title("In distribution", level=3), _table(report, [IN_DISTRIBUTION], with_members=True)]
    if first.ood:
        sets = _data_sets(first)
        average = ("average", ("auroc", "fpr95"), lambda result: result.ood_average())
        by_set = _table(report, [*((name, ("auroc",), read) for name, read in sets.items()), average])
        header = ["Model", *(f"{name} ↑" for name in sets), *by_set.header[-2:]]
        title = Title(f"OOD detection: AUROC by data set, score {report.score}", level=3)
        parts += [title, Table(header, by_set.rows)]
    parts += _differences(report, level=3)
    if any("threshold" in result.abstaining for result in report.models.values()):
        parts += [Title("Abstaining", level=3), *_what_abstaining_buys(report)]
    return parts


def all_parts(report: "UncertaintyReport", in_words: bool = False) -> list[Part]:
    """All that a report has data for; in_words: with longer titles of columns."""
    first = next(iter(report.models.values()))

    def table(*places: Place, with_members: bool = False) -> Table:
        return _table(report, places, with_members, in_words)

    main = [IN_DISTRIBUTION, *([OOD_AVERAGE] if first.ood else [])]
    title = "In distribution and on average out of distribution" if first.ood else "In distribution"
    parts: list[Part] = [Title(title), table(*main, with_members=True)]
    parts += [] if in_words else _differences(report)  # a page begins with them
    if first.ood:
        groups = [] if list(first.ood) == ["OOD"] else first.ood  # the average of all says the same
        averages = [(f"{group_title(group)} avg", DETECTION, _group_average(group)) for group in groups]
        explained = f"Score: {report.score}. Averages are over data sets, each counting the same."
        parts += [Title("OOD detection"), explained, table(*averages, OOD_AVERAGE)]
    for group, data_sets in first.ood.items():
        places = [(name, DETECTION, _data_set(group, name)) for name in data_sets]
        parts += [Title(group_title(group), level=3), table(*places)]
    if any(result.num_members > 1 for result in report.models.values()):
        places = [("ID", DIVERSITY, _of_several(lambda result: result.id))]
        if first.ood:
            places.append(("OOD avg", DIVERSITY, _of_several(lambda result: result.ood_average())))
        parts += [Title("Diversity of the members"), table(*places)]
    return parts + _decision_parts(report, table) + _corruption_parts(report, table)


def _differences(report: "UncertaintyReport", level: int = 2) -> list[Part]:
    """Which differences are more than chance, each model against the first."""
    sentences = report.gain_sentences()
    return [Title("What these rows can show", level), *sentences] if sentences else []


def _decision_parts(report: "UncertaintyReport", table: Callable[..., Table]) -> list[Part]:
    """What abstaining buys, and the prediction sets."""
    results, parts = list(report.models.values()), []
    if any(result.abstaining for result in results):
        places = [("", ABSTAINING, lambda result: result.abstaining)]
        if any("threshold" in result.abstaining for result in results):
            places.append(("threshold:", ("coverage", "risk"), lambda result: result.abstaining))
            sets = [(group, name) for group, found in results[0].ood.items() for name in found]
            places += [(f"threshold: {name}", ("refused",), _data_set(group, name)) for group, name in sets]
            if len(sets) > 1:
                places.append(("threshold: OOD avg", ("refused",), lambda result: result.ood_average()))
        explained = (
            "Risk: error rate among the answers. At 90 %: where only the most confident 90 % of the rows are answered."
        )
        parts += [Title("Abstaining"), explained, table(*places), *_what_abstaining_buys(report)]
    if any(result.sets for result in results):
        explained = "Sets of classes that should hold the right one for all but alpha of the rows."
        parts += [Title("Prediction sets"), explained, table(("", SETS, lambda result: result.sets))]
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


def _corruption_parts(report: "UncertaintyReport", table: Callable[..., Table]) -> list[Part]:
    first = next(iter(report.models.values()))
    severities = list(first.severity_averages())
    if not severities:
        return []
    averages = first.corruption_average()
    explained = f"Mean over the corruptions ({', '.join(first.corruptions)}); average: mean over the severities."
    if "ood_auroc" in averages:
        explained += " OOD AUROC: OOD data against corrupted data."
    if "shift_auroc" in averages:
        explained += " AUROC against clean: corrupted data against in-distribution data."
    parts: list[Part] = [Title("Under corruption"), explained]
    for metric in (each for each in UNDER_CORRUPTION if each in averages):
        places = [("clean", (metric,), clean)] if metric != "shift_auroc" else []
        places += [(f"sev{severity}", (metric,), _severity(severity)) for severity in severities]
        parts.append(table(*places, ("average", (metric,), lambda result: result.corruption_average())))
    if len(first.corruptions) > 1:
        places = [(name, ("accuracy",), _corruption(name)) for name in first.corruptions]
        parts += [Title("By corruption, mean over the severities", level=3), table(*places)]
    return parts


def clean(result: "ModelResult") -> "Metrics":
    """Severity 0."""
    return result.id | ({"ood_auroc": result.ood_average()["auroc"]} if result.ood else {})


def _corruption(name: str) -> Callable:
    return lambda result: result.corruption_averages()[name]


def _group_average(group: str) -> Callable:
    return lambda result: result.ood_average(group)


def _data_set(group: str, name: str) -> Callable:
    return lambda result: result.ood[group][name]


def _data_sets(result: "ModelResult") -> dict[str, Callable]:
    return {set_title(group, name): _data_set(group, name) for group, sets in result.ood.items() for name in sets}


def group_title(group: str) -> str:
    """A group of OOD sets; "OOD" where they were given without groups."""
    return "OOD" if group == "OOD" else f"{group}-OOD"


def set_title(group: str, name: str) -> str:
    return name if group == "OOD" else f"{name} ({group})"


def _severity(severity: str) -> Callable:
    return lambda result: result.severity_averages()[severity]


def _of_several(read: Callable) -> Callable:
    """A single model has no members to differ: its cells stay empty."""
    return lambda result: read(result) if result.num_members > 1 else {}


def _table(
    report: "UncertaintyReport", places: list[Place], with_members: bool = False, in_words: bool = False
) -> Table:
    results = list(report.models.values())
    header, columns = ["Model"], [list(report.models)]
    if with_members:
        header.append("Members")
        columns.append([str(result.num_members) for result in results])
    for place, metrics, read in places:
        for metric in metrics:
            header.append(COLUMNS[metric].heading(place, in_words))
            columns.append(_ranked([read(result).get(metric) for result in results], COLUMNS[metric]))
    return Table(header, list(zip(*columns, strict=True)))


def _ranked(values: list[float | None], column: Column) -> list[Cell]:
    """The best in bold, the second best underlined; by the digits shown, so that what looks equal is marked equal."""
    texts = [column.text(value) for value in values]
    if len(texts) < 2 or column.higher_is_better is None:
        return [Cell(text) for text in texts]
    shown = sorted({float(text) for text in texts if text != NO_VALUE}, reverse=column.higher_is_better)
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
