"""The four plots of a report: reliability, risk and coverage, histograms of scores, ROC curves."""

import itertools
import math
import re
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from .._io.pictures import COLOURS, NEUTRAL, Figure, drawable, finish_panel, legend_below
from .table import DATA


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .report import Report

LINE_STYLES = ("-", "--", "-.", ":")  # they tell lines apart in grey
ID_COLOUR = "#BBBBBB"
PANELS_PER_ROW = 3
CHARACTERS_PER_PANEL = 66  # in a legend
ROWS_PER_BIN = 10  # fewer say nothing about a bin's accuracy
TALL_BAR = 0.5  # beside a bar with more than this share of a data set the others are too small to see


def report_figures(report: "Report") -> dict[str, Figure]:
    """The plots that a report has curves for, the one that opens its page first: name -> figure."""
    figures, curves = {}, next(iter(report.curves.values()), {})
    if "risk_coverage" in curves:
        figures["risk_coverage"] = _risk_coverage(report)
        figures["reliability_diagram"] = _reliability_diagram(report)
    if curves.get("roc"):
        figures["score_histograms"] = _score_histograms(report)
        for name in curves["roc"]:
            figures[_free_name(f"roc {name}", figures)] = _roc(report, name)
    return figures


def _free_name(text: str, taken: Container[str]) -> str:
    """The text as a file name that no other figure has."""
    name = "_".join(re.findall(r"[\w-]+", text))[:80]
    numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(candidate for candidate in numbered if candidate not in taken)


def _grid(panels: int, width: float = 4.6, height: float = 4.2, **shared: Any) -> tuple[Figure, list["Axes"], int]:
    """A figure with so many panels, about as wide as high, and its number of columns."""
    columns = min(math.ceil(math.sqrt(panels)), PANELS_PER_ROW)
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(columns * width, rows * height), dpi=150, layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for panel in axes[panels:]:
        panel.set_visible(False)
    return figure, axes[:panels], columns


def _legend_below(figure: Figure, panel: "Axes", panels: int) -> None:
    """A legend of as many columns as fit below so many panels side by side."""
    labels = panel.get_legend_handles_labels()[1]
    per_panel = max(1, CHARACTERS_PER_PANEL // (max(map(len, labels)) + 6))
    columns = min(len(labels), panels * per_panel)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * math.ceil(len(labels) / columns))  # the panels keep their size
    legend_below(figure, panel, columns)


def _line(number: int) -> dict[str, Any]:
    """A different look for each of up to 32 lines."""
    style = LINE_STYLES[(number + number // len(COLOURS)) % len(LINE_STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style, "linewidth": 1.8}


def _reliability_diagram(report: "Report") -> Figure:
    """A panel per model; bins of fewer than ten rows are left out."""
    figure, panels, columns = _grid(len(report.models))
    for panel, (name, results) in zip(panels, report.models.items(), strict=True):
        metrics, curve = results[DATA], report.curves[name]["reliability"]
        width, counts = 1 / len(curve["share"]), [round(share * metrics["num_samples"]) for share in curve["share"]]
        bins = [place for place, count in enumerate(counts) if count >= ROWS_PER_BIN]
        lefts, accuracy = [place * width + 0.003 for place in bins], [curve["accuracy"][place] for place in bins]
        gaps = [curve["confidence"][place] - curve["accuracy"][place] for place in bins]
        bar = {"width": width - 0.006, "align": "edge"}
        panel.bar(lefts, accuracy, color=COLOURS[5], label="Accuracy of the bin", **bar)
        look = {"color": "none", "edgecolor": COLOURS[1], "hatch": "////", "linewidth": 0.8}
        panel.bar(lefts, gaps, bottom=accuracy, label="Gap to its mean confidence", **look, **bar)
        panel.plot([0, 1], [0, 1], color=NEUTRAL, linestyle="--", linewidth=1, label="Perfect calibration")
        for place in bins:
            count = f"{counts[place] / 1000:.0f}k" if counts[place] >= 10_000 else str(counts[place])
            panel.text((place + 0.5) * width, 1.04, count, ha="center", fontsize=7, color=NEUTRAL)
        panel.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="Confidence; above, the number of samples", ylabel="Accuracy")
        finish_panel(panel, f"{name}\nECE {metrics['ece']:.4f}, aECE {metrics['aece']:.4f}\n")
    _legend_below(figure, panels[0], columns)
    return figure


def _risk_coverage(report: "Report") -> Figure:
    """All models in one panel, a dot at each threshold. Drawn from half of the rows on, or from the lowest threshold: the
    risk of fewer rows is noisy and of little use."""
    figure, (panel,), _ = _grid(1, width=5.6, height=4.8)
    dots = [(results[DATA].get("answered"), results[DATA].get("answered_risk")) for results in report.models.values()]
    left = max(0, min([0.5, *(coverage - 0.05 for coverage, risk in dots if risk is not None)]))
    top = 0.0
    for number, (name, results) in enumerate(report.models.items()):
        curve = report.curves[name]["risk_coverage"]
        label = drawable(f"{name}, AURC {results[DATA]['aurc']:.4f}")
        panel.plot(curve["coverage"], curve["risk"], label=label, **_line(number))
        coverage, risk = dots[number]
        if risk is not None:
            panel.plot([coverage], [risk], "o", color=COLOURS[number % len(COLOURS)])
            top = max(top, risk)
        top = max([top, *(r for c, r in zip(curve["coverage"], curve["risk"], strict=True) if c >= left)])
    panel.set(xlabel="Coverage (share of samples answered, most confident first)", ylabel="Risk (error rate)")
    panel.set(xlim=(left, 1.01), ylim=(0, 1.05 * top or 1))
    has_dots = any(risk is not None for _, risk in dots)
    finish_panel(panel, f"Risk and coverage{'; dot: the threshold of the model' * has_dots}")
    _legend_below(figure, panel, 1)
    return figure


def _score_histograms(report: "Report") -> Figure:
    """The in-distribution histogram filled, the others as lines through the centres of the bins. The scale is logarithmic
    where one bar holds most of a data set."""
    histograms = [report.curves[name]["histograms"] for name in report.models]
    figure, panels, columns = _grid(len(histograms), sharey=True)
    shares = [share for bars in histograms for share in itertools.chain(bars["id"], *bars["ood"].values())]
    lowest, top = 0.0, 1.05 * max(shares)
    if max(shares) > TALL_BAR:
        lowest, top = min(share for share in shares if share > 0) / 2, 1.5 * max(shares)
        panels[0].set_yscale("log")
    for panel, name, histogram in zip(panels, report.models, histograms, strict=True):
        centres = [(low + high) / 2 for low, high in itertools.pairwise(histogram["edges"])]
        panel.stairs(histogram["id"], histogram["edges"], fill=True, color=ID_COLOUR, label="In distribution")
        for number, (data_set, values) in enumerate(histogram["ood"].items()):
            panel.plot(centres, [max(lowest, value) for value in values], label=drawable(data_set), **_line(number))
        panel.set(xlabel=f"OOD score: {drawable(report.score)}", ylabel="Share of the samples")
        panel.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        panel.tick_params(labelleft=True)
        finish_panel(panel, name)
    panels[0].set_ylim(lowest, top)
    _legend_below(figure, panels[0], columns)
    return figure


def _roc(report: "Report", data_set: str) -> Figure:
    """All models on one data set; FPR95 is read at the dotted line."""
    figure, (panel,), _ = _grid(1, width=5.6, height=5.2)
    for number, (name, results) in enumerate(report.models.items()):
        metrics, curve = results[data_set], report.curves[name]["roc"][data_set]
        label = f"{name}, AUROC {100 * metrics['auroc']:.1f} %, FPR95 {100 * metrics['fpr95']:.1f} %"
        panel.plot(curve["fpr"], curve["tpr"], label=drawable(label), **_line(number))
    panel.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=":", linewidth=1)
    panel.axhline(0.95, color=NEUTRAL, linestyle=":", linewidth=1)
    panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
    panel.set(xlabel="False positive rate (in distribution)", ylabel="True positive rate (out of distribution)")
    finish_panel(panel, data_set)
    _legend_below(figure, panel, 1)
    return figure
