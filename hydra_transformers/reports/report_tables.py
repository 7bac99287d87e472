"""The titles, sentences and tables of an uncertainty report."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..cost import Cost, readable_count
from ..uncertainty.abstention import what_it_buys
from .table import NO_VALUE, Cell, Part, Table, Title


if TYPE_CHECKING:
    from .report import Metrics, ModelResult, UncertaintyReport


@dataclass(frozen=True)
class Column:
    """How a metric is shown.

    higher_is_better: None where neither way is better
    words: a longer title, for pages
    meaning: for the legend of a page; "" where the title says it all
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


COLUMNS = {
    "accuracy": Column("Acc", True, percent=True, words="Accuracy"),
    "brier": Column("Brier", False, decimals=3, words="Brier score"),
    "nll": Column("NLL", False, decimals=3, meaning="Negative log-likelihood of the right class, in nats."),
    "ece": Column(
        "ECE", False, False, 4, meaning="Expected calibration error: how far confidence lies from accuracy."
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
        "AUROC", True, True, meaning="How often a foreign row gets a higher score than a known one; 50 is chance."
    ),
    "energy_auroc": Column(
        "AUROC by energy",
        True,
        True,
        meaning="The same by the energy of the logits, -log Σ exp, in place of the report's score.",
    ),
    "fpr95": Column("FPR95", False, True, meaning="Share of known rows refused where 95 % of the foreign ones are."),
    "aupr": Column("AUPR", True, True, meaning="Average precision of telling foreign rows from known ones."),
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
    # Neither way is better: a model that still answers right has no reason to doubt.
    "shift_auroc": Column("AUROC against clean", None, percent=True),
    # Neither way is better: a threshold trades these for one another, and alpha is chosen.
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


def group_title(group: str) -> str:
    """A group of OOD sets; "OOD" where they were given without groups."""
    return "OOD" if group == "OOD" else f"{group}-OOD"


def set_title(group: str, name: str) -> str:
    return name if group == "OOD" else f"{name} ({group})"


def clean_metrics(result: "ModelResult") -> "Metrics":
    """The metrics at severity 0."""
    return result.id | ({"ood_auroc": result.ood_average()["auroc"]} if result.ood else {})


def cost_table(costs: Mapping[str, Cost]) -> Table:
    """The costs that `compare_costs` found; times also as a multiple of the first row's."""
    first = next(iter(costs.values()))
    header = ["Model", "Parameters", "Multiply-adds", *(f"ms, batch {size}" for size in first.milliseconds)]
    rows = []
    for name, cost in costs.items():
        times = [f"{value:.2f} ({value / first.milliseconds[size]:.2f}x)" for size, value in cost.milliseconds.items()]
        rows.append([name, f"{cost.parameters:,}", readable_count(cost.multiply_adds), *times])
    return Table(header, rows)


def legend() -> Table:
    """The abbreviations of a page and their meanings."""
    ood = "Out of distribution: data of another kind than the model was made for; near resembles it, far does not."
    meanings = [[column.title, column.meaning] for column in COLUMNS.values() if column.meaning]
    return Table(["Short", "Meaning"], [["OOD", ood], *meanings], "ll")


def headline(report: "UncertaintyReport") -> str:
    """The first sentence of a page: how many rows, how many right answers, and which differences are sure."""
    name, first = next(iter(report.models.items()))
    sets = sum(map(len, first.ood.values()))
    foreign = f"{sets} sets of foreign data" if sets > 1 else "foreign data"
    rows = f"{first.id['num_samples']:,} rows"
    if len(report.models) == 1:
        right = f"{name} answers {first.id['accuracy']:.1%} of {rows} right"
        if not sets:
            return f"{right}."
        auroc = first.ood_average()["auroc"]
        return f"{right}, and tells {foreign} from known data with an AUROC of {auroc:.1%} (score {report.score})."
    right = ", ".join(f"{name} {result.id['accuracy']:.1%}" for name, result in report.models.items())
    data = f"{rows} and {foreign}" if sets else rows
    return " ".join([f"{len(report.models)} models on {data}; right answers: {right}.", *report.gain_sentences()])


# A few columns of a table: the place in their titles, their metrics, and the metrics of each model.
Columns = tuple[str, Sequence[str], Sequence["Metrics"]]


class ReportTables:
    """Makes the parts of a report; in_words: with longer titles of columns, for a page."""

    def __init__(self, report: "UncertaintyReport", in_words: bool = False):
        self.report, self.in_words = report, in_words
        self.results = list(report.models.values())
        self.first = self.results[0]
        self.sets = [(group, name) for group, sets in self.first.ood.items() for name in sets]
        # A second score that everyone has: nobody is beaten by the choice of the first.
        self.by_energy = ("energy_auroc",) if "energy_auroc" in self.first.ood_average() else ()

    def summary(self) -> list[Part]:
        """The main tables: quality of the answers, detection by data set, and what a threshold buys."""
        parts: list[Part] = [Title("In distribution", 3), self.table([self.in_distribution()], with_members=True)]
        if self.sets:
            columns = [("", ("auroc",), self.on_set(*each)) for each in self.sets]
            table = self.table([*columns, ("average", ("auroc", "fpr95", *self.by_energy), self.ood_averages())])
            table.header[1 : 1 + len(self.sets)] = [f"{set_title(*each)} ↑" for each in self.sets]
            parts += [Title(f"OOD detection: AUROC by data set, score {self.report.score}", 3), table]
        parts += self.differences(level=3)
        if any("threshold" in result.abstaining for result in self.results):
            parts += [Title("Abstaining", 3), *self.what_abstaining_buys()]
        return parts

    def all(self) -> list[Part]:
        """All tables that the report has data for."""
        title = "In distribution and on average out of distribution" if self.sets else "In distribution"
        average = [("OOD avg", (*DETECTION, *self.by_energy), self.ood_averages())] if self.sets else []
        parts: list[Part] = [Title(title), self.table([self.in_distribution(), *average], with_members=True)]
        parts += [] if self.in_words else self.differences()  # a page begins with them
        if self.sets:
            groups = [] if list(self.first.ood) == ["OOD"] else self.first.ood  # the average of all says the same
            metrics = (*DETECTION, *self.by_energy)
            averages = [(f"{group_title(group)} avg", metrics, self.ood_averages(group)) for group in groups]
            explained = f"Score: {self.report.score}. Averages are over data sets, each counting the same."
            parts += [Title("OOD detection"), explained, self.table([*averages, *average])]
        for group, sets in self.first.ood.items():
            columns = [(name, DETECTION, self.on_set(group, name)) for name in sets]
            parts += [Title(group_title(group), 3), self.table(columns)]
        return [*parts, *self.diversity(), *self.abstaining(), *self.prediction_sets(), *self.corruptions()]

    def differences(self, level: int = 2) -> list[Part]:
        """Which differences are more than chance, each model against the first."""
        sentences = self.report.gain_sentences()
        return [Title("What these rows can show", level), *sentences] if sentences else []

    def diversity(self) -> list[Part]:
        several = [result.num_members > 1 for result in self.results]
        if not any(several):
            return []
        places = {"ID": [result.id for result in self.results]}
        places |= {"OOD avg": self.ood_averages()} if self.sets else {}
        columns = [
            (place, DIVERSITY, [each if is_several else {} for each, is_several in zip(found, several, strict=True)])
            for place, found in places.items()
        ]
        return [Title("Diversity of the members"), self.table(columns)]

    def abstaining(self) -> list[Part]:
        found = [result.abstaining for result in self.results]
        if not any(found):
            return []
        columns: list[Columns] = [("", ("risk_at_100", "risk_at_95", "risk_at_90"), found)]
        if any("threshold" in each for each in found):
            columns += [("threshold:", ("coverage", "risk"), found)]
            columns += [(f"threshold: {name}", ("refused",), self.on_set(group, name)) for group, name in self.sets]
            if len(self.sets) > 1:
                columns += [("threshold: OOD avg", ("refused",), self.ood_averages())]
        explained = (
            "Risk: error rate among the answers. At 90 %: where only the most confident 90 % of the rows are answered."
        )
        return [Title("Abstaining"), explained, self.table(columns), *self.what_abstaining_buys()]

    def what_abstaining_buys(self) -> list[str]:
        sentences = []
        for name, result in self.report.models.items():
            found = result.abstaining
            if "threshold" in found:
                bought = f"at the threshold, {what_it_buys(found['coverage'], found['risk'], found['risk_at_100'])}"
            else:
                bought = what_it_buys(0.9, found["risk_at_90"], found["risk_at_100"]) if found else "not measured"
            sentences.append(f"{name}: {bought}.")
        return sentences

    def prediction_sets(self) -> list[Part]:
        found = [result.sets for result in self.results]
        if not any(found):
            return []
        explained = "Sets of classes that should hold the right one for all but alpha of the rows."
        columns = [("", ("alpha", "coverage", "mean_size", "single_class"), found)]
        return [Title("Prediction sets"), explained, self.table(columns)]

    def corruptions(self) -> list[Part]:
        if not self.first.corruptions:
            return []
        by_severity = [result.severity_averages() for result in self.results]
        averages = [result.corruption_average() for result in self.results]
        explained = (
            f"Mean over the corruptions ({', '.join(self.first.corruptions)}); average: mean over the severities."
        )
        if "ood_auroc" in averages[0]:
            explained += " OOD AUROC: OOD data against corrupted data."
        if "shift_auroc" in averages[0]:
            explained += " AUROC against clean: corrupted data against in-distribution data."
        parts: list[Part] = [Title("Under corruption"), explained]
        clean = [clean_metrics(result) for result in self.results]
        for metric in (*CLASSIFICATION, "ood_auroc", "shift_auroc"):
            if metric in averages[0]:
                columns = [("clean", (metric,), clean)] if metric != "shift_auroc" else []
                columns += [
                    (f"sev{severity}", (metric,), [each[severity] for each in by_severity])
                    for severity in by_severity[0]
                ]
                parts.append(self.table([*columns, ("average", (metric,), averages)]))
        if len(self.first.corruptions) > 1:
            found = [result.corruption_averages() for result in self.results]
            columns = [(name, ("accuracy",), [each[name] for each in found]) for name in self.first.corruptions]
            parts += [Title("By corruption, mean over the severities", 3), self.table(columns)]
        return parts

    def in_distribution(self) -> Columns:
        return "", CLASSIFICATION, [result.id for result in self.results]

    def ood_averages(self, group: str | None = None) -> "list[Metrics]":
        return [result.ood_average(group) for result in self.results]

    def on_set(self, group: str, name: str) -> "list[Metrics]":
        return [result.ood[group][name] for result in self.results]

    def table(self, columns: Iterable[Columns], with_members: bool = False) -> Table:
        header, cells = ["Model"], [list(self.report.models)]
        if with_members:
            header.append("Members")
            cells.append([str(result.num_members) for result in self.results])
        for place, metrics, found in columns:
            for metric in metrics:
                header.append(COLUMNS[metric].heading(place, self.in_words))
                cells.append(_marked([each.get(metric) for each in found], COLUMNS[metric]))
        return Table(header, list(zip(*cells, strict=True)))


def _marked(values: list[float | None], column: Column) -> list[Cell]:
    """The best in bold, the second best underlined; by the digits shown, so that equal texts get equal marks."""
    texts = [column.text(value) for value in values]
    if len(texts) < 2 or column.higher_is_better is None:
        return [Cell(text) for text in texts]
    shown = sorted({float(text) for text in texts if text != NO_VALUE}, reverse=column.higher_is_better)
    marks = dict(zip(shown, ("bold", "underline"), strict=False))
    return [Cell(text, "" if text == NO_VALUE else marks.get(float(text), "")) for text in texts]
