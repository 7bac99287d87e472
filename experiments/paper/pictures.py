"""Draws figures 4 to 7: heads' outputs by their principal components, what is left without more and more heads, and the
scores of a CLIP's heads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from hydra_transformers._io.pictures import COLOURS, MARKERS, NEUTRAL, Figure, finish_panel, legend_below, write_png

from .figures import PaperFigure
from .methods import swept_name
from .settings import Setting
from .studies import AnySetting
from .study import COMPONENTS, TOWER_SCORES
from .tables import Seeds, runs_of, title_of, value


SHOWN = ("accuracy", "ood.auroc", "ood.fpr95", "ood.aupr")


def draw(figure: PaperFigure, setting: AnySetting, seeds: Seeds, folder: Path) -> Path:
    """Write the figure's PNG and return its path."""
    path = folder / f"figure-{figure.number}-{setting.name}.png"
    if figure.number == 4:
        return draw_components(runs_of(seeds, COMPONENTS)[0], path)
    if figure.number == 7:
        return draw_tower_scores(runs_of(seeds, TOWER_SCORES)[0], path)
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


def layer_means(by_head: Sequence[Sequence[float]]) -> dict[int, float]:
    """Return {layer: mean score of its heads}."""
    layers = sorted({layer for layer, *_ in by_head})
    return {layer: mean(score for of_layer, _, score in by_head if of_layer == layer) for layer in layers}


def draw_tower_scores(found: Mapping[str, Any], path: Path) -> Path:
    """Draw the score of every head by layer and head, and the mean of each layer, one colour for each tower."""
    canvas = Figure(figsize=(8, 4), dpi=150, layout="constrained")
    panel = canvas.subplots()
    for number, (tower, by_head) in enumerate(found["towers"].items()):
        heads = 1 + max(head for _, head, _ in by_head)
        places = [layer + head / heads for layer, head, _ in by_head]
        panel.scatter(places, [score for *_, score in by_head], s=8, color=COLOURS[number], marker=MARKERS[number])
        means = layer_means(by_head)
        panel.hlines(
            list(means.values()), list(means), [layer + 1 for layer in means], color=COLOURS[number], label=tower
        )
    panel.set_yscale("log")
    panel.set_xlabel("layer")
    finish_panel(panel, "Taylor score of each head, and means of layers")
    legend_below(canvas, panel, len(found["towers"]))
    return write_png(canvas, path)
