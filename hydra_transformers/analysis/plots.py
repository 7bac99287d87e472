"""Analyses as PNG files."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from ..pictures import COLOURS, Figure, write_png


if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from .proposition import PruningUnderNoise

DPI = 150
NEUTRAL = "#555555"


def _finish(panel: "Axes", title: str) -> None:
    panel.set_title(title, fontsize=11)
    panel.grid(color="#DDDDDD", linewidth=0.6)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def _legend_below(figure: Figure, panel: "Axes", columns: int) -> None:
    handles, labels = panel.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9)


def draw_pruning_under_noise(result: "PruningUnderNoise", folder: str | os.PathLike) -> list[Path]:
    """By data set a panel, by head set two bars: the change that the second-order expansion expects, and the true one."""
    names, data_sets = list(result.changes), ["clean", *result.noisy_sets]
    size = (1.2 + 3.4 * len(data_sets), 1.5 + 0.62 * len(names))
    figure = Figure(figsize=size, dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(data_sets), sharex=True, sharey=True, squeeze=False)[0]
    places = range(len(names))
    for panel, data in zip(panels, data_sets, strict=True):
        changes = [result.changes[name][data] for name in names]
        looks = (
            ("second_order", -0.19, COLOURS[5], "Expected, to second order"),
            ("change", 0.19, COLOURS[1], "True"),
        )
        for key, shift, colour, label in looks:
            estimates = [getattr(each, key) for each in changes]
            panel.barh(
                [place + shift for place in places],
                [each.value for each in estimates],
                xerr=[each.error or 0 for each in estimates],
                height=0.36,
                color=colour,
                ecolor=NEUTRAL,
                capsize=2,
                label=label,
            )
        panel.axvline(0, color=NEUTRAL, linewidth=1)
        panel.set_yticks(list(places), names)
        panel.set_xlabel("Change of the loss (nats)")
        _finish(panel, data)
        panel.grid(visible=False, axis="y")
    panels[0].invert_yaxis()
    _legend_below(figure, panels[0], 2)
    return [write_png(figure, Path(folder) / "proposition.png")]
