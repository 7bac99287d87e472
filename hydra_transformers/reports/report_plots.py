"""Plots of an uncertainty report and of a fusion report, as PNG files."""

import itertools
import math
import os
import re
from collections.abc import Container, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .._io.pictures import COLOURS, MARKERS, NEUTRAL, Figure, drawable, finish_panel, legend_below, png_of, write_png
from .report_tables import COLUMNS, clean_metrics, set_title


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..cost import Cost
    from .fusion_report import FusionReport
    from .report import ModelResult, UncertaintyReport

LINE_STYLES = ("-", "--", "-.", ":")  # they tell lines apart in grey
ID_COLOUR = "#BBBBBB"
PANELS_PER_ROW = 3
CHARACTERS_PER_PANEL = 66  # in a legend
ROWS_PER_BIN = 10  # fewer say nothing about a bin's accuracy
TALL_BAR = 0.5  # beside a bar with more than this share of a data set the others are too small to see
SCORE_LABELS = {
    "msp": "OOD score: 1 - maximum probability",
    "max_logit": "OOD score: - maximum logit",
    "energy": "OOD score: energy",
    "entropy": "OOD score: entropy (nats)",
    "mutual_information": "OOD score: mutual information (nats)",
    "disagreement": "OOD score: disagreement",
}


def write_figures(figures: Mapping[str, Figure], folder: str | os.PathLike) -> list[Path]:
    """Writes name.png for each figure, and returns the paths."""
    return [write_png(figure, Path(folder) / f"{name}.png") for name, figure in figures.items()]


def report_pngs(report: "UncertaintyReport", costs: "Mapping[str, Cost] | None" = None) -> dict[str, bytes]:
    """The plots of a report: name -> content of a PNG file."""
    return {name: png_of(figure) for name, figure in report_figures(report, costs).items()}


def fusion_figures(report: "FusionReport") -> dict[str, Figure]:
    return {"way_to_the_mean": _way_to_the_mean(report), "cost_of_sharing": _cost_of_sharing(report)}


def report_figures(report: "UncertaintyReport", costs: "Mapping[str, Cost] | None" = None) -> dict[str, Figure]:
    """The plots that a report has data for."""
    figures = {
        "reliability_diagram": _reliability_diagram(report),
        "risk_coverage": _risk_coverage(report),
        "uncertainty_split": _uncertainty_split(report),
    }
    if costs is not None:
        figures["quality_against_cost"] = _quality_against_cost(report, costs)
    if any(result.ood for result in report.models.values()):
        figures["score_histograms"] = _score_histograms(report)
        for name in _ood_sets(next(iter(report.models.values()))):
            figures[_free_name(f"roc {name}", figures)] = _roc(report, name)
    if any(result.corruptions for result in report.models.values()):
        figures["severity_curves"] = _severity_curves(report)
        figures["accuracy_by_corruption"] = _accuracy_by_corruption(report)
    return figures


def _free_name(text: str, taken: Container[str]) -> str:
    """The text as a file name that no other figure has."""
    name = "_".join(re.findall(r"[\w-]+", text))[:80]
    numbered = itertools.chain([name], (f"{name}_{number}" for number in itertools.count(2)))
    return next(each for each in numbered if each not in taken)


def _ood_sets(result: "ModelResult") -> dict[str, dict[str, float]]:
    return {set_title(group, name): metrics for group, sets in result.ood.items() for name, metrics in sets.items()}


# Figures, panels and lines


def _grid(
    panels: int, width: float = 4.6, height: float = 4.2, columns: int | None = None, **shared: Any
) -> tuple[Figure, list["Axes"], int]:
    """A figure with so many panels, about as wide as high, and its number of columns."""
    columns = min(math.ceil(math.sqrt(panels)), PANELS_PER_ROW) if columns is None else columns
    rows = math.ceil(panels / columns)
    figure = Figure(figsize=(columns * width, rows * height), dpi=150, layout="constrained")
    found = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for panel in found[panels:]:
        panel.set_visible(False)
    return figure, found[:panels], columns


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


def _percentage(metric: str, value: float) -> float:
    return 100 * value if COLUMNS[metric].percent else value


# How sure, and how often right


class _Bin(NamedTuple):
    """Neighbouring bins of confidence as one: from `low` to `high`, with `count` rows, their accuracy and mean confidence."""

    low: float
    high: float
    count: int
    accuracy: float
    confidence: float

    def joined(self, other: "_Bin") -> "_Bin":
        count = self.count + other.count
        accuracy, confidence = (
            (self.count * mine + other.count * theirs) / count
            for mine, theirs in zip(self[3:], other[3:], strict=True)
        )
        return _Bin(self.low, other.high, count, accuracy, confidence)


def _joined_bins(curve: dict[str, list], num_samples: int) -> list[_Bin]:
    """The bins that hold rows; those with fewer than ten join their upper neighbour, the last its lower one."""
    width, found = 1 / len(curve["share"]), []
    columns = zip(curve["share"], curve["accuracy"], curve["confidence"], strict=True)
    for place, (share, accuracy, confidence) in enumerate(columns):
        if accuracy is not None:
            one = _Bin(place * width, (place + 1) * width, round(share * num_samples), accuracy, confidence)
            is_small = bool(found) and found[-1].count < ROWS_PER_BIN
            found.append(found.pop().joined(one) if is_small else one)
    if len(found) > 1 and found[-1].count < ROWS_PER_BIN:
        last = found.pop()
        found.append(found.pop().joined(last))
    return found


def _reliability_diagram(report: "UncertaintyReport") -> Figure:
    figure, panels, columns = _grid(len(report.models))
    for panel, (name, result) in zip(panels, report.models.items(), strict=True):
        bins = _joined_bins(result.curves["reliability"], result.id["num_samples"])
        lefts = [each.low + 0.003 for each in bins]
        accuracy = [each.accuracy for each in bins]
        gaps = [each.confidence - each.accuracy for each in bins]
        bar = {"width": [each.high - each.low - 0.006 for each in bins], "align": "edge"}
        panel.bar(lefts, accuracy, color=COLOURS[5], label="Accuracy of the bin", **bar)
        look = {"color": "none", "edgecolor": COLOURS[1], "hatch": "////", "linewidth": 0.8}
        panel.bar(lefts, gaps, bottom=accuracy, label="Gap to its mean confidence", **look, **bar)
        panel.plot([0, 1], [0, 1], color=NEUTRAL, linestyle="--", linewidth=1, label="Perfect calibration")
        for each in bins:
            panel.text((each.low + each.high) / 2, 1.04, _short(each.count), ha="center", fontsize=7, color=NEUTRAL)
        panel.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="Confidence; above, the number of samples", ylabel="Accuracy")
        finish_panel(panel, f"{name}\nECE {result.id['ece']:.4f}, aECE {result.id['aece']:.4f}\n")
    _legend_below(figure, panels[0], columns)
    return figure


def _short(count: int) -> str:
    """At most four characters, which fit above a bin."""
    for unit, size in (("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.0f}{unit}" if count >= 10 * size else f"{count / size:.1f}{unit}"
    return str(count)


def _risk_coverage(report: "UncertaintyReport") -> Figure:
    """All models in one panel, a dot at each fitted threshold.

    Drawn from half of the rows on, or from the lowest threshold: the risk of fewer rows is noisy and of little use."""
    figure, (panel,), _ = _grid(1, width=5.6, height=4.8)
    dots = [(result.abstaining.get("coverage"), result.abstaining.get("risk")) for result in report.models.values()]
    left = max(0, min([0.5, *(coverage - 0.05 for coverage, risk in dots if risk is not None)]))
    top = 0.0
    for number, (name, result) in enumerate(report.models.items()):
        curve, label = result.curves["risk_coverage"], drawable(f"{name}, AURC {result.id['aurc']:.4f}")
        panel.plot(curve["coverage"], curve["risk"], label=label, **_line(number))
        coverage, risk = dots[number]
        if risk is not None:
            panel.plot([coverage], [risk], "o", color=COLOURS[number % len(COLOURS)])
            top = max(top, risk)
        top = max([top, *(r for c, r in zip(curve["coverage"], curve["risk"], strict=True) if c >= left)])
    panel.set(xlabel="Coverage (share of samples answered, most confident first)", ylabel="Risk (error rate)")
    panel.set(xlim=(left, 1.01), ylim=(0, 1.05 * top or 1))
    finish_panel(panel, "Risk and coverage")
    _legend_below(figure, panel, 1)
    return figure


def _uncertainty_split(report: "UncertaintyReport") -> Figure:
    """Per model and data set a bar: mean aleatoric and epistemic uncertainty, on one scale for all models."""
    names = ["In distribution", *map(drawable, _ood_sets(next(iter(report.models.values()))))]
    size = {"width": 3.8 + 0.08 * max(map(len, names)), "height": 1.4 + 0.4 * len(names)}
    figure, panels, columns = _grid(len(report.models), sharex=True, sharey=True, **size)
    for panel, (name, result) in zip(panels, report.models.items(), strict=True):
        data_sets = [result.id, *_ood_sets(result).values()]
        aleatoric = [metrics["aleatoric"] for metrics in data_sets]
        epistemic = [metrics["mutual_information"] for metrics in data_sets]
        panel.barh(names, aleatoric, height=0.65, color=COLOURS[5], label="Aleatoric")
        look = {"height": 0.65, "color": COLOURS[1], "hatch": "///", "edgecolor": "white"}
        panel.barh(names, epistemic, left=aleatoric, label="Epistemic", **look)
        panel.set_xlabel("Mean uncertainty per sample (nats)")
        panel.xaxis.set_tick_params(labelbottom=True)
        finish_panel(panel, name)
        panel.grid(visible=False, axis="y")
    panels[0].invert_yaxis()  # shared: the in-distribution bar comes first everywhere
    _legend_below(figure, panels[0], columns)
    return figure


# Detection


def _score_histograms(report: "UncertaintyReport") -> Figure:
    """The in-distribution histogram filled, the others as lines through the centres of the bins.

    All models share their bins, unless their scores are of different orders of magnitude. The scale is logarithmic where
    one bar holds most of a data set."""
    histograms, is_common = _on_common_axis([result.curves["histograms"] for result in report.models.values()])
    figure, panels, columns = _grid(len(histograms), sharex=is_common, sharey=True)
    shares = [share for each in histograms for share in itertools.chain(each["id"], *each["ood"].values())]
    floor, top = 0.0, 1.05 * max(shares)
    if max(shares) > TALL_BAR:
        measured = [result.curves["histograms"] for result in report.models.values()]
        counted = (share for each in measured for share in itertools.chain(each["id"], *each["ood"].values()))
        floor, top = min(share for share in counted if share > 0) / 2, 1.5 * max(shares)
        panels[0].set_yscale("log")
    for panel, name, histogram in zip(panels, report.models, histograms, strict=True):
        centres = [(low + high) / 2 for low, high in itertools.pairwise(histogram["edges"])]
        panel.stairs(histogram["id"], histogram["edges"], fill=True, color=ID_COLOUR, label="In distribution")
        for number, (data_set, values) in enumerate(histogram["ood"].items()):
            panel.plot(centres, [max(floor, value) for value in values], label=drawable(data_set), **_line(number))
        panel.set(xlabel=SCORE_LABELS.get(report.score, f"OOD score: {report.score}"), ylabel="Share of the samples")
        panel.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        panel.tick_params(labelbottom=True, labelleft=True)
        finish_panel(panel, name)
    panels[0].set_ylim(floor, top)
    _legend_below(figure, panels[0], columns)
    return figure


def _on_common_axis(histograms: list[dict]) -> tuple[list[dict], bool]:
    """The histograms over common bins, and True; unchanged, and False, where one would shrink to a few of the bins."""
    ranges = [(each["edges"][0], each["edges"][-1]) for each in histograms]
    low, high = min(first for first, _ in ranges), max(last for _, last in ranges)
    if min(last - first for first, last in ranges) < 0.1 * (high - low):
        return histograms, False
    edges = np.linspace(low, high, len(histograms[0]["edges"]))

    def spread(shares: list[float], own: list[float]) -> list[float]:
        """As if the rows of a bin lay evenly in it."""
        return np.diff(np.interp(edges, own, [0.0, *np.cumsum(shares)])).clip(0).tolist()

    return [
        {
            "edges": edges.tolist(),
            "id": spread(each["id"], each["edges"]),
            "ood": {name: spread(shares, each["edges"]) for name, shares in each["ood"].items()},
        }
        for each in histograms
    ], True


def _roc(report: "UncertaintyReport", data_set: str) -> Figure:
    """All models on one data set; FPR95 is read at the dotted line."""
    figure, (panel,), _ = _grid(1, width=5.6, height=5.2)
    for number, (name, result) in enumerate(report.models.items()):
        metrics, curve = _ood_sets(result)[data_set], result.curves["roc"][data_set]
        label = f"{name}, AUROC {100 * metrics['auroc']:.1f} %, FPR95 {100 * metrics['fpr95']:.1f} %"
        panel.plot(curve["fpr"], curve["tpr"], label=drawable(label), **_line(number))
    panel.plot([0, 1], [0, 1], color=NEUTRAL, linestyle=":", linewidth=1)
    panel.axhline(0.95, color=NEUTRAL, linestyle=":", linewidth=1)
    panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
    panel.set(xlabel="False positive rate (in distribution)", ylabel="True positive rate (out of distribution)")
    finish_panel(panel, data_set)
    _legend_below(figure, panel, 1)
    return figure


# Cost and corruption


def _quality_against_cost(report: "UncertaintyReport", costs: "Mapping[str, Cost]") -> Figure:
    """A dot for each model: by measured time where there is one, otherwise by multiply-adds; the first model's is 1."""
    missing = [name for name in report.models if name not in costs]
    if missing:
        raise ValueError(f"costs has no {missing[0]!r}: pass what compare_costs gives for the models of the report")
    costs, first = {name: costs[name] for name in report.models}, next(iter(report.models))
    sizes = set.intersection(*(set(cost.milliseconds) for cost in costs.values()))
    if sizes:
        prices = {name: cost.milliseconds[max(sizes)] for name, cost in costs.items()}
        unit = f"Time of a batch of {max(sizes)}"
    else:
        prices, unit = {name: cost.multiply_adds for name, cost in costs.items()}, "Multiply-adds"
    qualities = {"accuracy": "Accuracy (%), higher is better", "nll": "NLL (nats), lower is better"}
    if all(result.ood for result in report.models.values()):
        qualities["auroc"] = "OOD AUROC (%), higher is better"
    figure, panels, columns = _grid(len(qualities), width=4, height=3.6, columns=len(qualities))
    for panel, (metric, title) in zip(panels, qualities.items(), strict=True):
        for number, (name, result) in enumerate(report.models.items()):
            value = _percentage(metric, (result.ood_average() if metric == "auroc" else result.id)[metric])
            look = {"marker": MARKERS[number % len(MARKERS)], "color": COLOURS[number % len(COLOURS)]}
            panel.scatter([prices[name] / prices[first]], [value], s=70, label=drawable(name), **look)
        panel.set(xlabel=f"{unit}, {first}'s being 1")
        panel.set_xlim(0, 1.1 * max(prices.values()) / prices[first])
        panel.margins(y=0.15)
        finish_panel(panel, title)
    _legend_below(figure, panels[0], columns)
    return figure


def _severity_curves(report: "UncertaintyReport") -> Figure:
    """All models by severity, 0 being the clean data: the mean over the corruptions of each metric."""
    titles = {
        "accuracy": "Accuracy (%)",
        "nll": "NLL (nats)",
        "ece": "ECE",
        "brier": "Brier score",
        "ood_auroc": "AUROC (%), OOD data against corrupted",
        "shift_auroc": "AUROC (%), corrupted data against clean",
    }
    found = [result.corruption_average() for result in report.models.values()]
    metrics = [metric for metric in titles if all(metric in each for each in found)]
    figure, panels, columns = _grid(len(metrics), height=3.6)
    for panel, metric in zip(panels, metrics, strict=True):
        for number, (name, result) in enumerate(report.models.items()):
            by_severity = {"0": clean_metrics(result) | {"shift_auroc": 0.5}} | result.severity_averages()
            _draw_sweep(panel, by_severity, metric, name, number)
        if metric in ("nll", "ece", "brier"):
            panel.set_ylim(bottom=0)
        panel.set(xlabel="Severity")
        finish_panel(panel, titles[metric])
    _legend_below(figure, panels[0], columns)
    return figure


def _accuracy_by_corruption(report: "UncertaintyReport") -> Figure:
    """A panel per corruption, all models by severity, 0 being the clean data."""
    corruptions = next(iter(report.models.values())).corruptions
    figure, panels, columns = _grid(len(corruptions), width=3.6, height=3, sharey=True)
    for panel, corruption in zip(panels, corruptions, strict=True):
        for number, (name, result) in enumerate(report.models.items()):
            _draw_sweep(panel, {"0": result.id} | result.corruptions[corruption], "accuracy", name, number)
        panel.set(xlabel="Severity", ylabel="Accuracy (%)")
        finish_panel(panel, corruption.replace("_", " "))
    _legend_below(figure, panels[0], columns)
    return figure


def _draw_sweep(panel: "Axes", by_severity: dict[str, dict], metric: str, name: str, number: int) -> None:
    values = [_percentage(metric, metrics[metric]) for metrics in by_severity.values()]
    panel.plot(list(by_severity), values, marker="o", markersize=4, label=drawable(name), **_line(number))


# The fusion report


def _way_to_the_mean(report: "FusionReport") -> Figure:
    """NLL and accuracy of the members, on average, from their own weights to the mean."""
    figure, panels, _ = _grid(2)
    way = [step.t for step in report.path]
    metrics = {"nll": ("NLL", f"Rises by {report.rise:.3f}"), "accuracy": ("Accuracy", "")}
    for number, (panel, (metric, (name, title))) in enumerate(zip(panels, metrics.items(), strict=True)):
        values = [getattr(step, metric) for step in report.path]
        panel.plot(way, values, marker="o", **_line(number))
        panel.plot([0, 1], [values[0], values[-1]], color=NEUTRAL, linestyle=":", linewidth=1)
        panel.set(xlabel="Share of the way from own weights to the mean", ylabel=f"{name}, mean of the members")
        finish_panel(panel, title)
    return figure


def _cost_of_sharing(report: "FusionReport") -> Figure:
    """How much higher the ensemble's NLL is than not fused, with its 95 % interval, for each choice of shared parts."""
    choices = [report.fused, *report.parts]
    figure, (panel,), _ = _grid(1, width=6.4, height=4.4)
    changes, reach = [each.nll.difference for each in choices], [each.nll.half_width for each in choices]
    names = [", ".join(each.shared) for each in choices]
    panel.barh(names, changes, xerr=reach, height=0.6, color=COLOURS[5], capsize=3)
    panel.axvline(0, color=NEUTRAL, linewidth=1)
    panel.invert_yaxis()
    panel.set(xlabel="NLL fused less not fused (nats, 95 % interval)", ylabel="Shared")
    finish_panel(panel, report.verdict.capitalize())
    panel.grid(visible=False, axis="y")
    return figure
