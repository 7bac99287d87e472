"""Draws docs/images/fusing.png: how much of three models is merged, and what that costs and gains.

python -m scripts.draw_fusing [OUTPUT]
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean, stdev

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.recipe_table import Budget, ways_to_fuse
from experiments.results import RESULTS

from .picture_style import IMAGES, NORMAL, SMALL, Look, arrow, box, canvas, save, text


OUTPUT = IMAGES / "fusing.png"
LAYERS = 12
MEMBERS = 3
STEP, SIDE = 0.34, 0.27  # from layer to layer, and of one
HEIGHT = 0.24  # of a branch's layer
ROW = 1.25  # from one way to the next


def draw_way(panel: Axes, y: float, merged: int, look: Look) -> None:
    """Draw the trunk of so many merged layers, and the branches behind it."""
    left = 1.45
    height = MEMBERS * HEIGHT + 0.16
    for layer in range(LAYERS):
        x = left + STEP * layer
        if layer < merged:
            box(panel, x, y, SIDE, height, look.faded, look.shared)
            continue
        for member in range(MEMBERS):
            bottom = y + (MEMBERS - 1 - member) * (HEIGHT + 0.08)
            box(panel, x, bottom, SIDE, HEIGHT, look.members[member], look.tints[member])


def draw(found: Mapping[int, Budget], look: Look) -> Figure:
    figure, panel = canvas(look, 1.35 + ROW * len(found))
    top = 0.55 + ROW * len(found)
    text(panel, 3.45, top + 0.35, "twelve layers of three models", look.ink, NORMAL, weight="bold", va="baseline")
    text(panel, 6.95, top + 0.35, "work", look.ink, NORMAL, weight="bold", va="baseline")
    text(panel, 8.85, top + 0.35, "accuracy", look.ink, NORMAL, weight="bold", va="baseline")
    for index, (merged, budget) in enumerate(found.items()):
        y = top - ROW * (index + 1) + 0.25
        middle = y + 0.44
        text(panel, 0.1, middle, f"{merged} merged" if merged else "run apart", look.ink, ha="left")
        draw_way(panel, y, merged, look)
        arrow(panel, (5.55, middle), (5.9, middle), look.faded)
        # The work as a bar, one model's being 1
        box(panel, 6.05, middle - 0.33, 0.55 * budget.work, 0.3, look.faded, look.pale)
        text(panel, 6.05, middle + 0.18, f"{budget.work:.2f}", look.ink, NORMAL, ha="left")
        values = [100 * row["test"]["accuracy"] for row in budget.rows]
        text(panel, 8.85, middle, f"{mean(values):.1f} ± {stdev(values):.1f} %", look.ink, NORMAL)
    text(panel, 2.95, 0.28, "grey: merged, run once", look.faded, SMALL)
    text(panel, 7.25, 0.28, "one model: 1", look.faded, SMALL)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    found = ways_to_fuse(json.loads((RESULTS / "recipe-tiny-imagenet.json").read_text()))
    numbers = []
    for merged, budget in found.items():
        accuracy = mean(row["test"]["accuracy"] for row in budget.rows)
        numbers.append(f"{merged} merged: {budget.work:.2f}, {accuracy:.4f}")
    save(lambda look: draw(found, look), output, "; ".join(numbers))


if __name__ == "__main__":
    main()
