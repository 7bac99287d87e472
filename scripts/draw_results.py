"""Draws docs/images/results.png from the recipe's results files: what methods reach, by the trainings that they cost.

With the .npz beside the results file, errors.png too: errors against coverage, and where calibration lands.

python -m scripts.draw_results [OUTPUT]
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.judging import RISK
from experiments.recipe_table import SHARED_LAYERS, Budget, budgets, headliners
from experiments.results import RESULTS
from hydra_transformers.uncertainty.metrics import error_coverage_curve

from .picture_style import IMAGES, LARGE, SMALL, WIDTH, Look, save, style_axes


Arrays = dict[str, np.ndarray]  # of the .npz beside a results file, see `judging.arrays_of`

OUTPUT = IMAGES / "results.png"
COSTS = (1.1, 1.5, 2.5, 4.0, float("inf"))  # the work up to which a colour is for
COST_NAMES = ("1", "1.3", "2", "3", "5")
LEFT_OUT = ("three times as long", "soup")  # of the plot of errors, which has room for four lines
COLUMN = 3.5  # where the names of crowded dots stand
# Of other dots, where the name stands: points to the right and up, and how it is aligned.
BESIDE = {
    "One model": ((9, -9), "left", "top"),
    "One model, 1.5 x as long": ((9, -2), "left", "top"),
    "One run of 3 members": ((-9, 0), "right", "center"),
    "Deep Ensemble of 2": ((0, 19), "center", "bottom"),
    "Deep Ensemble of 5": ((18, -9), "center", "top"),
}
PLACES = {"accuracy": ("test", "accuracy", 100), "nll": ("test", "nll_with_temperature", 1)}


class Shown(NamedTuple):
    """A method in the plot.

    method: kind, members, epochs, count and merged layers of its budget
    aside: how far its point is moved, so that points of the same cost do not hide each other
    """

    name: str
    method: tuple[str, int, int, int, int]
    aside: float = 0.0


def shown_methods(content: dict[str, Any]) -> list[Shown]:
    """Return the methods of the plot; one training has the file's usual number of epochs."""
    epochs = content["epochs_of_one_training"]
    longer = content["recipe_of_budgets"]["epochs"]
    return [
        Shown("One model", ("training", 1, epochs, 0, 0)),
        Shown("One model, 1.5 x as long", ("training", 1, longer, 0, 0)),
        Shown("One model, 3 x as long", ("training", 1, 3 * epochs, 0, 0)),
        Shown("One run of 3 members", ("training", 3, longer, 0, 0)),
        Shown("Two runs fused: the default", ("fused apart", 3, longer, 2, SHARED_LAYERS), -0.12),
        Shown("Soup of 2", ("soup", 1, longer, 2, 0), -0.06),
        Shown("Three models fused", ("fused apart", 1, epochs, 3, 9), 0.2),
        Shown("Deep Ensemble of 2", ("ensemble", 1, epochs, 2, 0)),
        Shown("Deep Ensemble of 2, longer", ("ensemble", 1, longer, 2, 0), 0.1),
        Shown("Deep Ensemble of 3", ("ensemble", 1, epochs, 3, 0), 0.01),
        Shown("Deep Ensemble of 5", ("ensemble", 1, epochs, 5, 0)),
    ]


def found_methods(content: dict[str, Any]) -> list[tuple[Shown, Budget]]:
    """Return the methods of the plot with what the file has of them."""
    by_method = {}
    for budget in budgets(content):
        if budget.members == 1 or budget.trunk == SHARED_LAYERS:
            method = (budget.kind, budget.members, budget.epochs, budget.count, budget.merged)
            by_method[method] = budget
    return [(shown, by_method[shown.method]) for shown in shown_methods(content) if shown.method in by_method]


def values_of(budget: Budget, metric: str) -> list[float]:
    part, name, factor = PLACES[metric]
    return [factor * row[part][name] for row in budget.rows]


def colour_of(work: float, look: Look) -> str:
    place = next(index for index, most in enumerate(COSTS) if work <= most)
    return look.costs[place]


def draw_points(panel: Axes, methods: Sequence[tuple[Shown, Budget]], metric: str, look: Look) -> list[tuple]:
    """Draw a dot for each method, with the deviation over seeds; one seed is a ring.

    Returns:
        Name, place and colour of each dot.
    """
    dots = []
    for shown, budget in methods:
        values = values_of(budget, metric)
        x = budget.trainings + shown.aside
        y = mean(values)
        colour = colour_of(budget.work, look)
        if len(values) > 1:
            panel.errorbar(x, y, stdev(values), color=colour, linewidth=1.5, capsize=3)
        is_ring = len(values) == 1
        fill = look.ground if is_ring else colour
        panel.plot(x, y, "o", markersize=9, markerfacecolor=fill, markeredgecolor=colour, markeredgewidth=2)
        dots.append((shown.name, x, y, colour))
    return dots


def name_dots(panel: Axes, dots: Sequence[tuple], top: float, look: Look) -> None:
    """Write the names of dots of about three trainings in a column at the right, others beside their dot.

    Args:
        panel (`Axes`): where the dots are.
        dots (`Sequence[tuple]`): of `draw_points`.
        top (`float`): of the column, as a share of the panel's height.
        look (`Look`): its colours.
    """
    crowded = [dot for dot in dots if dot[0] not in BESIDE]
    crowded.sort(key=lambda dot: dot[2], reverse=not panel.yaxis_inverted())
    for index, (name, x, y, colour) in enumerate(crowded):
        _, place = panel.transData.inverted().transform(panel.transAxes.transform((0, top - 0.085 * index)))
        panel.plot([x, COLUMN - 0.3, COLUMN - 0.05], [y, place, place], color=colour, linewidth=0.9, zorder=1)
        weight = "bold" if "default" in name else "normal"
        panel.text(COLUMN, place, name, fontsize=SMALL, color=look.ink, va="center", weight=weight)
    for name, x, y, _ in dots:
        if name in BESIDE:
            offset, across, up = BESIDE[name]
            look_of_name = {"fontsize": SMALL, "color": look.ink, "ha": across, "va": up, "linespacing": 1.2}
            words = name.replace("run of ", "run of\n").replace("Ensemble of 5", "Ensemble\nof 5")
            panel.annotate(words, (x, y), offset, textcoords="offset points", **look_of_name)


def numbers_of(content: dict[str, Any]) -> str:
    """Return what the plot shows, by which a picture is known that was drawn from other results."""
    numbers = []
    for shown, budget in found_methods(content):
        means = [f"{mean(values_of(budget, metric)):.4g}" for metric in PLACES]
        numbers.append(f"{shown.name}: {budget.trainings:.2f}, {', '.join(means)}")
    return "; ".join(numbers)


def draw_costs(content: dict[str, Any], look: Look) -> Figure:
    """Draw accuracy and NLL against trainings, in colours of the work at inference."""
    methods = found_methods(content)
    figure = Figure(figsize=(WIDTH, WIDTH * 1.12))
    panels = figure.subplots(2, 1, sharex=True)
    figure.subplots_adjust(left=0.09, right=0.985, top=0.9, bottom=0.14, hspace=0.22)
    kinds = (("accuracy", "Accuracy in %, higher is better", 0.95), ("nll", "NLL, turned: higher is better", 0.6))
    for panel, (metric, title, top) in zip(panels, kinds, strict=True):
        dots = draw_points(panel, methods, metric, look)
        values = [dot[2] for dot in dots]
        room = 0.16 * (max(values) - min(values))
        panel.set_ylim(min(values) - room, max(values) + room)
        if metric == "nll":
            panel.invert_yaxis()
        panel.set_xlim(0.65, 5.75)
        style_axes(panel, look, title)
        name_dots(panel, dots, top, look)
    panels[1].set_xlabel("trainings that are paid for, one model's being 1", fontsize=SMALL, color=look.ink)
    panels[1].set_xticks([1, 2, 3, 4, 5])

    figure.suptitle(
        "What a budget of trainings buys", x=0.02, y=0.985, ha="left", fontsize=LARGE, color=look.ink, weight="bold"
    )
    marks = [
        Line2D([], [], marker="o", linestyle="", markersize=9, color=colour, label=name)
        for colour, name in zip(look.costs, COST_NAMES, strict=True)
    ]
    ring = {"markerfacecolor": look.ground, "markeredgecolor": look.faded, "markeredgewidth": 2}
    marks.append(Line2D([], [], marker="o", linestyle="", markersize=9, label="one seed only", **ring))
    legend = figure.legend(
        handles=marks,
        loc="lower center",
        ncols=len(marks),
        frameon=False,
        fontsize=SMALL,
        title="work of an answer, one model's being 1",
        handletextpad=0.1,
        columnspacing=1.2,
    )
    legend.get_title().set_fontsize(SMALL)
    for words in (legend.get_title(), *legend.get_texts()):
        words.set_color(look.ink)
    return figure


# Errors against coverage


def curve_of(arrays: Arrays, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return coverage, and the mean over the rows of these numbers of the share of wrong answers at it."""
    coverage = np.linspace(0.3, 1, 141)
    risks = []
    for number in numbers:
        confidence = 1 - torch.from_numpy(arrays[f"{number}/test_doubt"]).double()
        is_wrong = 1 - torch.from_numpy(arrays[f"{number}/test_correct"]).double()
        of_row, risk = error_coverage_curve(confidence, is_wrong)
        risks.append(np.interp(coverage, of_row.numpy(), risk.numpy()))
    return coverage, np.mean(risks, axis=0)


def numbers_with_arrays(content: dict[str, Any], arrays: Arrays) -> dict[str, list[int]]:
    """Return four methods by name, and the numbers of their rows of which arrays are kept."""
    places = {id(row): number for number, row in enumerate(content["rows"])}
    methods = {}
    for name, budget in headliners(content).items():
        numbers = [places[id(row)] for row in budget.rows]
        kept = [number for number in numbers if f"{number}/test_doubt" in arrays]
        if kept and not any(other in name for other in LEFT_OUT):
            methods[name.strip("*").split(", `")[0]] = kept
    return methods


def draw_errors(content: dict[str, Any], arrays: Arrays, look: Look) -> Figure:
    """Draw wrong answers against answered rows, and a pale dot for each draw of a calibration to at most 5 %."""
    figure = Figure(figsize=(WIDTH, WIDTH * 0.75))
    panel = figure.add_axes((0.1, 0.3, 0.87, 0.6))
    for index, (name, numbers) in enumerate(numbers_with_arrays(content, arrays).items()):
        colour = look.members[index]
        coverage, risk = curve_of(arrays, numbers)
        panel.plot(100 * coverage, 100 * risk, color=colour, linewidth=2, label=name)
        for number in numbers:
            answered, wrong = (100 * arrays[f"{number}/draws_{which}"] for which in ("answered", "wrong"))
            panel.plot(answered, wrong, ".", color=colour, markersize=4, alpha=0.25)
    panel.axhline(100 * RISK, color=look.ink, linewidth=1, linestyle="--")
    panel.set_xlim(30, 100)
    panel.set_ylim(bottom=0)
    style_axes(panel, look, "Wrong answers in %, lower is better", "answered rows in %, the surest first")
    panel.text(
        31, 100 * RISK + 0.15, f"at most {RISK:.0%} wrong: promised", fontsize=SMALL, color=look.ink, va="bottom"
    )
    legend = figure.legend(loc="lower left", ncols=2, frameon=False, fontsize=SMALL, title="dots: calibrated on draws")
    for words in (legend.get_title(), *legend.get_texts()):
        words.set_color(look.ink)
        words.set_fontsize(SMALL)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    path = RESULTS / "recipe-tiny-imagenet.json"
    content = json.loads(path.read_text())
    save(lambda look: draw_costs(content, look), output, numbers_of(content))
    if path.with_suffix(".npz").exists():
        arrays = dict(np.load(path.with_suffix(".npz")))
        save(lambda look: draw_errors(content, arrays, look), output.with_name("errors.png"))


if __name__ == "__main__":
    main()
