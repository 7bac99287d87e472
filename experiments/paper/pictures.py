"""Figures 4 to 6: heads' outputs by their principal components, and what is left without more and more heads."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from hydra_transformers._io.pictures import COLOURS, MARKERS, NEUTRAL, Figure, finish_panel, legend_below, write_png

from .methods import sweep, swept_name
from .settings import Setting, smallest_of
from .study import COMPONENTS
from .tables import Seeds, runs_of, title_of, value


SHOWN = ("accuracy", "ood.auroc", "ood.fpr95", "ood.aupr")


@dataclass(frozen=True)
class PaperFigure:
    """
    number: the paper's
    title: what it shows
    settings: the paper's
    methods: (setting, whether it is the smallest) -> what it is drawn from
    """

    number: int
    title: str
    settings: tuple[str, ...]
    methods: Callable[[Setting, bool], Sequence[str]]


def swept(tuned: bool) -> Callable[[Setting, bool], Sequence[str]]:
    def methods(setting: Setting, smallest: bool) -> Sequence[str]:
        return ["single", *sweep(smallest_of(setting) if smallest else setting, tuned)]

    return methods


FIGURES = {
    figure.number: figure
    for figure in (
        PaperFigure(4, "Outputs of single heads on known and OOD rows", ("cifar100",), lambda *_: [COMPONENTS]),
        PaperFigure(5, "Heads removed, not fine-tuned", ("imagenet1k",), swept(tuned=False)),
        PaperFigure(6, "Heads removed, fine-tuned", ("imagenet1k",), swept(tuned=True)),
    )
}


def draw(figure: PaperFigure, setting: Setting, seeds: Seeds, folder: Path) -> Path:
    """Write the figure's PNG and return its path."""
    path = folder / f"figure-{figure.number}-{setting.name}.png"
    if figure.number == 4:
        return draw_components(runs_of(seeds, COMPONENTS)[0], path)
    return draw_sweep(setting, seeds, figure.number == 6, path)


def draw_sweep(setting: Setting, seeds: Seeds, tuned: bool, path: Path) -> Path:
    """Draw a panel for each metric, a line for Taylor and one for CircAvg."""
    canvas = Figure(figsize=(13, 3.6), dpi=150, layout="constrained")
    panels = canvas.subplots(1, len(SHOWN))
    dense = runs_of(seeds, "single")
    for panel, column in zip(panels, SHOWN, strict=True):
        whole = mean(value(run, column) for run in dense)
        panel.axhline(whole, color=NEUTRAL, linestyle=":", linewidth=1, label="all heads")
        for number, (name, title) in enumerate((("taylor", "Taylor"), ("circ-avg", "CircAvg"))):
            values = []
            for removed in setting.removed_per_layer:
                runs = runs_of(seeds, swept_name(name, removed, tuned))
                values.append(mean(value(run, column) for run in runs))
            look = {"color": COLOURS[number], "marker": MARKERS[number]}
            panel.plot(setting.removed_per_layer, values, label=title, **look)
        panel.set_xlabel("heads removed per layer")
        finish_panel(panel, f"{title_of(column)} (%)")
    legend_below(canvas, panels[0], 3)
    return write_png(canvas, path)


def draw_components(found: Mapping[str, Any], path: Path) -> Path:
    """Draw a panel for each head: the most important above, the least important below."""
    rows = [found["heads"][title] for title in ("most important", "least important")]
    canvas = Figure(figsize=(2.2 * len(rows[0]), 4.6), dpi=150, layout="constrained")
    panels = canvas.subplots(len(rows), len(rows[0]), squeeze=False)
    for title, heads, of_row in zip(("most important", "least important"), rows, panels, strict=True):
        for head, panel in zip(heads, of_row, strict=True):
            for number, name in enumerate(("known", "ood")):
                across, down = zip(*head[name], strict=True)
                label = found["ood_set"] if name == "ood" else name
                panel.scatter(across, down, s=4, color=COLOURS[number], label=label)
            layer, place = head["head"]
            finish_panel(panel, f"{title}: {layer}, {place}")
    legend_below(canvas, panels[0][0], 2)
    return write_png(canvas, path)
