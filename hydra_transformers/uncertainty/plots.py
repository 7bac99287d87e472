"""A report as PNG files."""

import itertools
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..pictures import COLOURS, Figure, finish_panel, legend_below, write_png
from .tables import COLUMNS, clean


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .fusion_report import FusionReport
    from .report import ModelResult, UncertaintyReport

# They repeat in grey what colours tell apart.
LINE_STYLES = ("-", "--", "-.", ":")
ID_COLOUR = "#BBBBBB"
PANELS_PER_ROW = 3
CHARACTERS_PER_PANEL = 66  # of a legend's small print
SCORE_LABELS = {
    "msp": "OOD score: 1 - maximum probability",
    "max_logit": "OOD score: - maximum logit",
    "energy": "OOD score: energy",
    "entropy": "OOD score: entropy (nats)",
    "mutual_information": "OOD score: mutual information (nats)",
    "disagreement": "OOD score: disagreement",
}


def draw_report(report: "UncertaintyReport", folder: str | os.PathLike) -> list[Path]:
    """Write the plots the report has data for, and return their paths."""
    figures = {
        "reliability_diagram": _reliability_diagram(report),
        "risk_coverage": _risk_coverage(report),
        "uncertainty_split": _uncertainty_split(report),
    }
    if any(result.ood for result in report.models.values()):
        figures["score_histograms"] = _score_histograms(report)
        figures["roc"] = _roc(report)
    if any(result.corruptions for result in report.models.values()):
        figures["severity_curves"] = _severity_curves(report)
        figures["accuracy_by_corruption"] = _accuracy_by_corruption(report)
    return [write_png(figure, Path(folder) / f"{name}.png") for name, figure in figures.items()]


def draw_fusion_report(report: "FusionReport", folder: str | os.PathLike) -> list[Path]:
    """Write the plots of a fusion report, and return their paths."""
    figures = {"way_to_the_mean": _way_to_the_mean(report), "cost_of_sharing": _cost_of_sharing(report)}
    return [write_png(figure, Path(folder) / f"{name}.png") for name, figure in figures.items()]


def _grid(models: int, width: float = 4.6, height: float = 4.2, **shared: Any) -> tuple[Figure, list["Axes"], int]:
    """A figure with one panel per model, about as wide as high; and its number of columns."""
    columns = min(math.ceil(math.sqrt(models)), PANELS_PER_ROW)
    rows = math.ceil(models / columns)
    figure = Figure(figsize=(columns * width, rows * height), dpi=150, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False, **shared).flat)
    for panel in panels[models:]:
        panel.set_visible(False)
    return figure, panels[:models], columns


def _reliability_diagram(report: "UncertaintyReport") -> Figure:
    figure, panels, columns = _grid(len(report.models))
    for panel, (name, result) in zip(panels, report.models.items(), strict=True):
        _reliability(panel, result.curves["reliability"])
        finish_panel(panel, f"{name}\nECE {result.id['ece']:.4f}, aECE {result.id['aece']:.4f}")
    _legend_below(figure, panels[0], columns)
    return figure


def _legend_below(figure: Figure, panel: "Axes", columns: int) -> None:
    labels = panel.get_legend_handles_labels()[1]
    columns = _legend_columns(labels, columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.2 * math.ceil(len(labels) / columns))  # the panels keep their size
    legend_below(figure, panel, columns)


def _legend_columns(labels: list[str], panels: int) -> int:
    """As many columns as fit below that many panels side by side."""
    per_panel = max(1, CHARACTERS_PER_PANEL // (max(map(len, labels)) + 6))
    return min(len(labels), panels * per_panel)


def _line(number: int) -> dict[str, Any]:
    """A look of its own for each of up to 32 lines."""
    style = LINE_STYLES[(number + number // len(COLOURS)) % len(LINE_STYLES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": style, "linewidth": 1.8}


def _reliability(panel: "Axes", curve: dict[str, list]) -> None:
    bins = len(curve["share"])
    full = [b for b in range(bins) if curve["accuracy"][b] is not None]
    centres = [(b + 0.5) / bins for b in full]
    accuracy = [curve["accuracy"][b] for b in full]
    gaps = [curve["confidence"][b] - curve["accuracy"][b] for b in full]
    bar = {"width": 0.92 / bins}
    panel.bar(centres, accuracy, color=COLOURS[5], label="Accuracy of the bin", **bar)
    gap_look = {"color": "none", "edgecolor": COLOURS[1], "hatch": "////", "linewidth": 0.8}
    panel.bar(centres, gaps, bottom=accuracy, label="Gap to its mean confidence", **gap_look, **bar)
    edges = [b / bins for b in range(bins + 1)]
    panel.stairs(curve["share"], edges, color="#000000", linewidth=1.4, label="Share of the samples")
    panel.plot([0, 1], [0, 1], color="#555555", linestyle="--", linewidth=1, label="Perfect calibration")
    panel.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="Confidence", ylabel="Accuracy; share of the samples")


def _score_histograms(report: "UncertaintyReport") -> Figure:
    """The in-distribution histogram filled, the others as lines through their bins' centres, which stay apart by eye."""
    figure, panels, columns = _grid(len(report.models))
    for panel, (name, result) in zip(panels, report.models.items(), strict=True):
        histograms = result.curves["histograms"]
        edges = histograms["edges"]
        centres = [(low + high) / 2 for low, high in itertools.pairwise(edges)]
        panel.stairs(histograms["id"], edges, fill=True, color=ID_COLOUR, label="In distribution")
        for number, (data_set, shares) in enumerate(histograms["ood"].items()):
            panel.plot(centres, shares, label=data_set, **_line(number))
        panel.set(
            xlabel=SCORE_LABELS.get(report.score, f"OOD score: {report.score}"),
            ylabel="Share of the data set's samples",
        )
        panel.set_ylim(bottom=0)
        finish_panel(panel, name)
    _legend_below(figure, panels[0], columns)
    return figure


def _roc(report: "UncertaintyReport") -> Figure:
    data_sets = max(len(_ood_sets(result)) for result in report.models.values())
    figure, panels, _ = _grid(len(report.models), height=4.4 + 0.18 * data_sets)
    for panel, (name, result) in zip(panels, report.models.items(), strict=True):
        aurocs = {key: metrics["auroc"] for key, metrics in _ood_sets(result).items()}
        for number, (data_set, curve) in enumerate(result.curves["roc"].items()):
            label = f"{data_set}, AUROC {100 * aurocs[data_set]:.1f} %"
            panel.plot(curve["fpr"], curve["tpr"], label=label, **_line(number))
        panel.plot([0, 1], [0, 1], color="#555555", linestyle=":", linewidth=1, label="Chance")
        panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.02))
        panel.set(xlabel="False positive rate (in distribution)", ylabel="True positive rate (out of distribution)")
        finish_panel(panel, name)
        columns = _legend_columns(panel.get_legend_handles_labels()[1], panels=1)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False, fontsize=8, ncols=columns)
    return figure


def _risk_coverage(report: "UncertaintyReport") -> Figure:
    """All models in one panel: the lower the line, the better confidence tells right from wrong.

    From half of the rows on, or from the lowest threshold: the risk of fewer is of few errors and little use. A dot is a
    fitted threshold."""
    figure, (panel,), _ = _grid(1, width=5.6, height=4.8)
    dots = [(result.abstaining.get("coverage"), result.abstaining.get("risk")) for result in report.models.values()]
    left = max(0, min([0.5, *(coverage - 0.05 for coverage, risk in dots if risk is not None)]))
    top = 0.0
    for number, (name, result) in enumerate(report.models.items()):
        curve = result.curves["risk_coverage"]
        panel.plot(curve["coverage"], curve["risk"], label=f"{name}, AURC {result.id['aurc']:.4f}", **_line(number))
        coverage, risk = dots[number]
        if risk is not None:
            panel.plot([coverage], [risk], "o", color=COLOURS[number % len(COLOURS)])
            top = max(top, risk)
        top = max([top, *(r for c, r in zip(curve["coverage"], curve["risk"], strict=True) if c >= left)])
    panel.set(xlabel="Coverage (share of samples answered, most confident first)", ylabel="Risk (error rate)")
    panel.set(xlim=(left, 1.01), ylim=(0, 1.05 * top or 1))
    finish_panel(panel, "Risk and coverage")
    _legend_below(figure, panel, columns=1)
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
    metrics = [metric for metric in titles if all(metric in of_model for of_model in found)]
    figure, panels, columns = _grid(len(metrics), height=3.6)
    for panel, metric in zip(panels, metrics, strict=True):
        for number, (name, result) in enumerate(report.models.items()):
            by_severity = {"0": clean(result) | {"shift_auroc": 0.5}} | result.severity_averages()
            _sweep(panel, by_severity, metric, name, number)
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
            _sweep(panel, {"0": result.id} | result.corruptions[corruption], "accuracy", name, number)
        panel.set(xlabel="Severity", ylabel="Accuracy (%)")
        finish_panel(panel, corruption.replace("_", " "))
    _legend_below(figure, panels[0], columns)
    return figure


def _sweep(panel: "Axes", by_severity: dict[str, dict], metric: str, name: str, number: int) -> None:
    factor = 100 if COLUMNS[metric].percent else 1
    values = [factor * metrics[metric] for metrics in by_severity.values()]
    panel.plot(list(by_severity), values, marker="o", markersize=4, label=name, **_line(number))


def _uncertainty_split(report: "UncertaintyReport") -> Figure:
    """Per model and data set a bar: mean aleatoric and epistemic uncertainty, on one scale for all models."""
    names = ["In distribution", *_ood_sets(next(iter(report.models.values())))]
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


def _ood_sets(result: "ModelResult") -> dict[str, dict[str, float]]:
    return {f"{name} ({group})": metrics for group, sets in result.ood.items() for name, metrics in sets.items()}


def _way_to_the_mean(report: "FusionReport") -> Figure:
    """NLL and accuracy of the members, on average, from their own weights to the mean."""
    figure, panels, _ = _grid(2)
    way = [step.t for step in report.path]
    for number, (panel, metric, title) in enumerate(
        zip(panels, ("nll", "accuracy"), ("NLL", "Accuracy"), strict=True)
    ):
        values = [getattr(step, metric) for step in report.path]
        panel.plot(way, values, marker="o", **_line(number))
        panel.plot([0, 1], [values[0], values[-1]], color="#555555", linestyle=":", linewidth=1)
        panel.set(xlabel="Share of the way from own weights to the mean", ylabel=f"{title}, mean of the members")
        finish_panel(panel, f"Rises by {report.rise:.3f}" if metric == "nll" else "")
    return figure


def _cost_of_sharing(report: "FusionReport") -> Figure:
    """What the ensemble's NLL has more than not fused, with its 95 % interval, for each choice of what to share."""
    choices = [report.fused, *report.parts]
    figure, (panel,), _ = _grid(1, width=6.4, height=4.4)
    names = [", ".join(choice.shared) for choice in choices]
    changes = [choice.nll for choice in choices]
    reach = [change.half_width for change in changes]
    panel.barh(names, [change.difference for change in changes], xerr=reach, height=0.6, color=COLOURS[5], capsize=3)
    panel.axvline(0, color="#555555", linewidth=1)
    panel.invert_yaxis()
    panel.set(xlabel="NLL fused less not fused (nats, 95 % interval)", ylabel="Shared")
    finish_panel(panel, report.verdict.capitalize())
    panel.grid(visible=False, axis="y")
    return figure
