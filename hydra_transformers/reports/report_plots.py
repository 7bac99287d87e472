"""The four plots of a report: reliability, risk and coverage, histograms of scores, ROC curves."""

import itertools
import math
import re
from collections.abc import Container, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from .._io.pictures import COLOURS, NEUTRAL, Figure, drawable, finish_panel, legend_below
from .table import DATA


if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINE_STYLES = ("-", "--", "-.", ":")  # they tell lines apart in grey
ID_COLOUR = "#BBBBBB"
PANELS_PER_ROW = 3
CHARACTERS_PER_PANEL = 66  # in a legend
ROWS_PER_BIN = 10  # fewer say nothing about a bin's accuracy
TALL_BAR = 0.5  # beside a bar with more than this share of a data set the others are too small to see


class HasCurves(Protocol):
    """What the plots read of a `Report`."""

    @property
    def models(self) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
        """Model -> data set -> metric -> value."""
        ...

    @property
    def curves(self) -> Mapping[str, Mapping[str, Any]]:
        """Model -> its curves."""
        ...

    @property
    def score(self) -> str:
        """The OOD score."""
        ...


def report_figures(report: HasCurves) -> dict[str, Figure]:
    """Draw the plots that a report has curves for: name -> figure.

    The one that opens its page is the first.
    """
    figures: dict[str, Figure] = {}
    curves = next(iter(report.curves.values()), {})
    if "risk_coverage" in curves:
        figures["risk_coverage"] = _risk_coverage(report)
        figures["reliability_diagram"] = _reliability_diagram(report)
    if curves.get("roc"):
        figures["score_histograms"] = _score_histograms(report)
        for name in curves["roc"]:
            figures[_free_name(f"roc {name}", figures)] = _roc(report, name)
    return figures


def _free_name(text: str, taken: Container[str]) -> str:
    """Return the text as a file name that no other figure has."""
    words = re.findall(r"[\w-]+", text)
    name = "_".join(words)[:80]
    free = name
    number = 2
    while free in taken:
        free = f"{name}_{number}"
        number += 1
    return free


def _grid(panels: int, width: float = 4.6, height: float = 4.2, **shared: Any) -> tuple[Figure, list["Axes"], int]:
    """Return a figure, so many panels in it, about as wide as high, and its number of columns."""
    columns = min(math.ceil(math.sqrt(panels)), PANELS_PER_ROW)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(columns * width, rows * height), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for panel in axes[panels:]:
        panel.set_visible(False)
    return figure, axes[:panels], columns


def _legend_below(figure: Figure, panel: "Axes", panels: int) -> None:
    """Draw a legend of as many columns as fit below so many panels side by side."""
    _, labels = panel.get_legend_handles_labels()
    longest = max(map(len, labels))
    per_panel = max(1, CHARACTERS_PER_PANEL // (longest + 6))
    columns = min(len(labels), panels * per_panel)

    # The figure grows by the legend's rows, so that the panels keep their size.
    rows = math.ceil(len(labels) / columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * rows)
    legend_below(figure, panel, columns)


def _line(number: int) -> dict[str, Any]:
    """Return a different look for each of up to 32 lines."""
    style = LINE_STYLES[(number + number // len(COLOURS)) % len(LINE_STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style, "linewidth": 1.8}


def _reliability_diagram(report: HasCurves) -> Figure:
    """Draw a panel per model; bins of fewer than ten rows are pale."""
    figure, panels, columns = _grid(len(report.models))
    for panel, (name, results) in zip(panels, report.models.items(), strict=True):
        metrics = results[DATA]
        curve = report.curves[name]["reliability"]
        width = 1 / len(curve["share"])
        counts = [round(share * metrics["num_samples"]) for share in curve["share"]]
        bins = [number for number, count in enumerate(counts) if count > 0]

        # Bars of the accuracy, and from there to the mean confidence.
        labels = {"accuracy": "Accuracy of the bin", "gap": "Gap to its mean confidence"}
        for is_thin in (False, True):
            drawn = [number for number in bins if (counts[number] < ROWS_PER_BIN) == is_thin]
            if not drawn:
                continue
            lefts = [number * width + 0.003 for number in drawn]
            accuracies = [curve["accuracy"][number] for number in drawn]
            gaps = [curve["confidence"][number] - curve["accuracy"][number] for number in drawn]
            bar = {"width": width - 0.006, "align": "edge"}
            hatched = {"color": "none", "edgecolor": COLOURS[1], "hatch": "////", "linewidth": 0.8}
            accuracy_label, gap_label = labels["accuracy"], labels["gap"]
            if is_thin:
                bar["alpha"] = 0.3
                accuracy_label = f"Pale: fewer than {ROWS_PER_BIN} rows, too few to tell"
                gap_label = None
            panel.bar(lefts, accuracies, color=COLOURS[5], label=accuracy_label, **bar)
            panel.bar(lefts, gaps, bottom=accuracies, label=gap_label, **hatched, **bar)
        panel.plot([0, 1], [0, 1], color=NEUTRAL, linestyle="--", linewidth=1, label="Perfect calibration")

        # How many samples each bar stands for.
        for number in bins:
            count = str(counts[number])
            if counts[number] >= 10_000:
                count = f"{counts[number] / 1000:.0f}k"
            panel.text((number + 0.5) * width, 1.04, count, ha="center", fontsize=7, color=NEUTRAL)
        panel.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="Confidence; above, the number of samples", ylabel="Accuracy")
        finish_panel(panel, f"{name}\nECE {metrics['ece']:.4f}, aECE {metrics['aece']:.4f}\n")
    _legend_below(figure, panels[0], columns)
    return figure


def _risk_coverage(report: HasCurves) -> Figure:
    """Draw all models in one panel, a dot at each threshold.

    From half of the rows on, or from the lowest threshold: the risk of fewer rows is noisy and of
    little use.
    """
    figure, (panel,), _ = _grid(1, width=5.6, height=4.8)

    # Where models answer, and so where the panel begins.
    dots = {}
    for name, results in report.models.items():
        risk = results[DATA].get("answered_risk")
        if risk is not None:
            dots[name] = (results[DATA]["answered"], risk)
    left = min([0.5, *(coverage - 0.05 for coverage, _ in dots.values())])
    left = max(0, left)

    # The curves and dots, and the highest risk that is to be seen.
    highest = 0.0
    for number, (name, results) in enumerate(report.models.items()):
        curve = report.curves[name]["risk_coverage"]
        label = drawable(f"{name}, AURC {results[DATA]['aurc']:.4f}")
        panel.plot(curve["coverage"], curve["risk"], label=label, **_line(number))
        if name in dots:
            coverage, risk = dots[name]
            panel.plot([coverage], [risk], "o", color=COLOURS[number % len(COLOURS)])
            highest = max(highest, risk)
        for coverage, risk in zip(curve["coverage"], curve["risk"], strict=True):
            if coverage >= left:
                highest = max(highest, risk)
    panel.set(xlabel="Coverage (share of samples answered, most confident first)", ylabel="Risk (error rate)")
    panel.set(xlim=(left, 1.01), ylim=(0, 1.05 * highest or 1))
    title = "Risk and coverage"
    if dots:
        title += "; dot: the threshold of the model"
    finish_panel(panel, title)
    _legend_below(figure, panel, 1)
    return figure


def _score_histograms(report: HasCurves) -> Figure:
    """Draw the in-distribution histogram filled, the others as lines through the bins' centres.

    The scale is logarithmic where one bar holds most of a data set.
    """
    histograms = [report.curves[name]["histograms"] for name in report.models]
    figure, panels, columns = _grid(len(histograms), sharey=True)

    # The scale, which all panels share.
    shares = []
    for bars in histograms:
        shares += itertools.chain(bars["id"], *bars["ood"].values())
    lowest = 0.0
    highest = 1.05 * max(shares)
    if max(shares) > TALL_BAR:
        lowest = min(share for share in shares if share > 0) / 2
        highest = 1.5 * max(shares)
        panels[0].set_yscale("log")

    for panel, name, histogram in zip(panels, report.models, histograms, strict=True):
        centres = [(low + high) / 2 for low, high in itertools.pairwise(histogram["edges"])]
        panel.stairs(histogram["id"], histogram["edges"], fill=True, color=ID_COLOUR, label="In distribution")
        for number, (data_set, values) in enumerate(histogram["ood"].items()):
            heights = [max(lowest, value) for value in values]
            panel.plot(centres, heights, label=drawable(data_set), **_line(number))
        panel.set(xlabel=f"OOD score: {drawable(report.score)}", ylabel="Share of the samples")
        panel.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        panel.tick_params(labelleft=True)
        finish_panel(panel, name)
    panels[0].set_ylim(lowest, highest)
    _legend_below(figure, panels[0], columns)
    return figure


def _roc(report: HasCurves, data_set: str) -> Figure:
    """Draw all models on one data set; FPR95 is read at the dotted line."""
    figure, (panel,), _ = _grid(1, width=5.6, height=5.2)
    for number, (name, results) in enumerate(report.models.items()):
        metrics = results[data_set]
        curve = report.curves[name]["roc"][data_set]
        label = f"{name}, AUROC {100 * metrics['auroc']:.1f} %, FPR95 {100 * metrics['fpr95']:.1f} %"
        panel.plot(curve["fpr"], curve["tpr"], label=drawable(label), **_line(number))
    panel.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=":", linewidth=1)
    panel.axhline(0.95, color=NEUTRAL, linestyle=":", linewidth=1)
    panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
    panel.set(xlabel="False positive rate (in distribution)", ylabel="True positive rate (out of distribution)")
    finish_panel(panel, data_set)
    _legend_below(figure, panel, 1)
    return figure
