"""Plots of the analyses, as PNG files."""

import math
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from hydra_transformers._io.pictures import (
    COLOURS,
    MARKERS,
    NEUTRAL,
    Figure,
    drawable,
    finish_panel,
    legend_below,
    write_png,
)
from hydra_transformers.pruning.heads import Head

from .sweep import PERCENT, TITLES


if TYPE_CHECKING:
    from .comparison import HeadSetComparison
    from .head_scores import HeadScores
    from .proposition import PruningUnderNoise
    from .separation import HeadSeparation
    from .sweep import BudgetSweep

DPI = 150
ABSENT = "#DDDDDD"
MAPS_PER_ROW = 4


def draw_pruning_under_noise(result: "PruningUnderNoise", folder: str | os.PathLike) -> list[Path]:
    """A panel for each data set, and in it two bars for each head set: the expected and the true change of the loss."""
    names, data_sets = list(result.changes), ["clean", *result.noisy_sets]
    size = (1.2 + 3.4 * len(data_sets), 1.5 + 0.62 * len(names))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(data_sets), sharex=True, sharey=True, squeeze=False)[0]
    places = range(len(names))
    for panel, data in zip(panels, data_sets, strict=True):
        changes = [result.changes[name][data] for name in names]
        looks = (
            ("second_order", -0.19, COLOURS[5], "Expected, to second order"),
            ("change", 0.19, COLOURS[1], "True (lines: ± one standard error)"),
        )
        for key, shift, colour, label in looks:
            estimates = [getattr(each, key) for each in changes]
            panel.barh(
                [place + shift for place in places],
                [each.value for each in estimates],
                xerr=[math.nan if each.error is None else each.error for each in estimates],  # unknown is not 0
                height=0.36,
                color=colour,
                ecolor=NEUTRAL,
                capsize=2,
                label=label,
            )
        panel.axvline(0, color=NEUTRAL, linewidth=1)
        panel.set_yticks(list(places), list(map(drawable, names)))
        panel.set_xlabel("Change of the loss (nats)")
        panel.locator_params(axis="x", nbins=5)
        finish_panel(panel, data)
        panel.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    legend_below(figure, panels[0], 2)
    return [write_png(figure, Path(folder) / "proposition.png")]


def draw_separation(result: "HeadSeparation", folder: str | os.PathLike) -> list[Path]:
    paths = [write_png(_auroc_maps(result), Path(folder) / "heads_auroc.png")]
    if result.pictures:
        paths.append(write_png(_principal_components(result), Path(folder) / "heads_pca.png"))
    return paths


def _auroc_maps(result: "HeadSeparation") -> Figure:
    """A panel for each foreign set: how well each head tells it from known data."""
    maps = {
        foreign: {head: 100 * each.auroc for head, each in of_heads.items()}
        for foreign, of_heads in result.networks["all heads"].items()
    }
    return _maps(maps, "AUROC (%)", low=50, high=100, crossed=set(result.ranking), note="ranked to go")


def _maps(
    maps: Mapping[str, Mapping[Head, float]],
    label: str | None = None,
    low: float | None = None,
    high: float | None = None,
    crossed: Collection[Head] = (),
    note: str = "",
    shades: Mapping[float, str] | None = None,
) -> Figure:
    """Heads by layer, a panel for each title.

    label: of the colour bar; None for no bar
    crossed: heads that get a dot; `note` explains it in the legend
    shades: values and their names in the legend
    """
    rows = math.ceil(len(maps) / MAPS_PER_ROW)
    columns = math.ceil(len(maps) / rows)
    layers, heads = (1 + max(head[axis] for of_map in maps.values() for head in of_map) for axis in (-2, -1))
    width = max(1.9, 0.24 * heads + 0.5)
    titles = ["\n".join(wrap(title, int(11 * width))) for title in maps]
    lines = max(title.count("\n") for title in titles)
    size = (1.6 + columns * width, 0.7 + rows * (0.24 * layers + 0.8 + 0.2 * lines))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = list(figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat)
    values = [value for of_map in maps.values() for value in of_map.values()]
    scale = {"vmin": min(values) if low is None else low, "vmax": max(values) if high is None else high}
    for panel, title, of_map in zip(panels, titles, maps.values(), strict=False):
        by_place = {head[-2:]: value for head, value in of_map.items()}
        grid = [[by_place.get((layer, head), math.nan) for head in range(heads)] for layer in range(layers)]
        shown = panel.imshow(grid, cmap="Blues", aspect="equal", **scale)
        panel.set_facecolor(ABSENT)  # heads that were pruned before
        dots = [head for head in of_map if head in crossed]
        if dots:
            panel.plot([h[-1] for h in dots], [h[-2] for h in dots], ".", color=COLOURS[1], markersize=4, label=note)
        panel.set_title(drawable(title), fontsize=11)
        panel.set(xticks=_ticks(heads), yticks=_ticks(layers), xlabel="head", ylabel="layer")
        panel.label_outer()
        if title in titles[-columns:]:  # no panel is below
            panel.set_xlabel("head")
            panel.tick_params(axis="x", labelbottom=True)
        panel.set_xticks([head - 0.5 for head in range(heads)], minor=True)
        panel.set_yticks([layer - 0.5 for layer in range(layers)], minor=True)
        panel.grid(which="minor", color="white", linewidth=1.2)
        panel.tick_params(which="minor", length=0)
        panel.spines[:].set_visible(False)
    for panel in panels[len(maps) :]:
        panel.set_visible(False)
    if label is not None:
        figure.colorbar(shown, ax=panels, label=label, shrink=0.9)
    for value, name in (shades or {}).items():
        look = {"color": shown.cmap(shown.norm(value)), "markeredgecolor": NEUTRAL, "markersize": 9}
        panels[0].plot([], [], "s", label=name, **look)
    if any(len(of_map) < layers * heads for of_map in maps.values()):
        panels[0].plot([], [], "s", label="not in the model", color=ABSENT, markersize=9)
    if panels[0].get_legend_handles_labels()[1]:
        legend_below(figure, panels[0], 3)
    return figure


def _ticks(count: int) -> range:
    return range(0, count, 1 if count <= 8 else 2 if count <= 16 else 4)


def _principal_components(result: "HeadSeparation") -> Figure:
    """The heads that go last above, those that go first below, each along its two principal components."""
    groups = result.by_importance(len(result.pictures))
    shown = {name: [head for head in groups[name] if head in result.pictures] for name in ("go last", "go first")}
    columns = max(map(len, shown.values()))
    figure = Figure(figsize=(1.75 * columns + 0.4, 4.4), dpi=DPI, layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False)
    foreign = result.foreign_sets[0]
    for row, (name, heads) in zip(panels, shown.items(), strict=True):
        for panel, head in zip(row, heads, strict=False):
            picture = result.pictures[head]
            for points, colour, label in (
                (picture.known, "#999999", "known data"),
                (picture.foreign, COLOURS[1], drawable(foreign)),
            ):
                panel.plot(*zip(*points, strict=True), ".", color=colour, markersize=2.5, alpha=0.6, label=label)
            auroc = 100 * result.networks["all heads"][foreign][head].auroc
            panel.set_title(f"layer {head[-2]}, head {head[-1]}\nAUROC {auroc:.0f} %", fontsize=9)
            panel.set(xticks=[], yticks=[])
        row[0].set_ylabel(f"heads that {name}", fontsize=10)
        for panel in row[len(heads) :]:
            panel.set_visible(False)
    legend_below(figure, panels[0][0], 2, markerscale=3)
    return figure


def draw_comparison(result: "HeadSetComparison", folder: str | os.PathLike) -> list[Path]:
    paths = []
    for tower in dict.fromkeys(head[:-2] for head in result.heads):
        maps = {}
        for name, pruned in result.head_sets.items():
            kept = {head: float(head not in set(pruned)) for head in result.heads if head[:-2] == tower}
            maps[f"{name}: {sum(kept.values()):.0f} kept"] = kept
        name = "_".join(["kept_heads", *tower])
        paths.append(
            write_png(_maps(maps, low=0, high=1.3, shades={1: "kept", 0: "cut out"}), Path(folder) / f"{name}.png")
        )
    if result.pairs:
        paths.append(write_png(_overlaps(result), Path(folder) / "overlaps.png"))
    return paths


def _overlaps(result: "HeadSetComparison") -> Figure:
    """The overlap of each two sets, with the chance level in brackets."""
    names = list(result.head_sets)
    shown = list(map(drawable, names))
    figure = Figure(figsize=(2.2 + 0.85 * len(names), 1.4 + 0.62 * len(names)), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    places = {name: place for place, name in enumerate(names)}
    grid = [[math.nan] * len(names) for _ in names]
    for (a, b), pair in result.pairs.items():
        grid[places[b]][places[a]] = pair.overlap
        text = f"{pair.overlap:.2f}\n({pair.overlap_by_chance:.2f})"
        ink = "white" if pair.overlap > 0.55 else "#333333"
        panel.text(places[a], places[b], text, ha="center", va="center", fontsize=8, color=ink)
    panel.imshow(grid, cmap="Blues", vmin=0, vmax=1, aspect="auto")
    panel.set_xticks(range(len(names) - 1), shown[:-1], rotation=30, ha="right")
    panel.set_yticks(range(1, len(names)), shown[1:])
    panel.set(xlim=(-0.5, len(names) - 1.5), ylim=(len(names) - 0.5, 0.5))
    panel.set_title("Overlap of pruned heads (by chance)", fontsize=11)
    panel.spines[:].set_visible(False)
    return figure


def draw_sweep(result: "BudgetSweep", folder: str | os.PathLike) -> list[Path]:
    """A panel for each metric: a line for each order over the number of heads that go, dashed before and solid after training;
    several draws are shown as their mean and a band from the lowest to the highest."""
    metrics = [metric for metric in ("accuracy", "auroc", "ece", "time") if metric in result.metrics]
    columns = 2 if len(metrics) == 4 else len(metrics)
    rows = len(metrics) // columns
    figure = Figure(figsize=(0.6 + 3.8 * columns, 0.6 + 3.1 * rows), dpi=DPI, layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).flat)
    for panel, metric in zip(panels, metrics, strict=True):
        scale = 100 if metric in PERCENT else 1
        dense = scale * getattr(result.dense, metric)
        panel.axhline(dense, color=NEUTRAL, linestyle=":", linewidth=1, label="all heads")
        for number, order in enumerate(result.orders):
            look = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)], "markersize": 4}
            for tuned in result.stages:
                values = result.values(order, metric, tuned)
                if not values:
                    continue
                budgets = [0, *values] if not tuned else list(values)
                several = [[scale * each for each in of_budget] for of_budget in values.values()]
                means = [math.fsum(each) / len(each) for each in several]
                style = "-" if tuned or True not in result.stages else "--"
                label = drawable(f"{order}, fine-tuned" if tuned else order)
                start = [] if tuned else [dense]
                panel.plot(budgets, start + means, linestyle=style, linewidth=1.6, label=label, **look)
                if max(map(len, several)) > 1:
                    low, high = (start + [bound(each) for each in several] for bound in (min, max))
                    band = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
                    panel.fill_between(budgets, low, high, label=f"{label}: lowest to highest", **band)
        panel.set_xlabel(f"Heads that go, of {result.dense.kept}")
        panel.xaxis.get_major_locator().set_params(integer=True)
        finish_panel(panel, TITLES[metric])
    labels = panels[0].get_legend_handles_labels()[1]
    inches = 0.6 + 0.075 * max(map(len, labels))  # of a legend entry
    legend_below(figure, panels[0], max(1, min(len(labels), int(figure.get_figwidth() / inches))))
    return [write_png(figure, Path(folder) / "budgets.png")]


def draw_scores(result: "HeadScores", folder: str | os.PathLike) -> list[Path]:
    """Every head's score by layer and head, a line for each tower."""
    figure = Figure(figsize=(7.2, 3.6), dpi=DPI, layout="constrained")
    panel = figure.subplots()
    for number, (tower, layers) in enumerate(result.by_layer().items()):
        widest = max(map(len, layers.values()))
        places = [layer + head / widest for layer, scores in layers.items() for head in range(len(scores))]
        values = [score for scores in layers.values() for score in scores]
        look = {"color": COLOURS[number], "marker": MARKERS[number], "markersize": 3, "linewidth": 1}
        panel.plot(places, values, label=tower or "score", **look)
    if min(result.scores.values()) > 0:
        panel.set_yscale("log")
    panel.set_xticks(sorted({layer for layers in result.by_layer().values() for layer in layers}))
    panel.set(xlabel="Layer, and within it head by head", ylabel="Score")
    finish_panel(panel, "Scores of heads")
    if len(result.by_layer()) > 1:
        panel.legend(frameon=False, fontsize=9)
    return [write_png(figure, Path(folder) / "scores.png")]
