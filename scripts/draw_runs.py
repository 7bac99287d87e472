"""Draws docs/images/runs.png: two runs of three members, and what becomes of them when they are fused.

python -m scripts.draw_runs [OUTPUT]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .picture_style import IMAGES, NORMAL, Look, arrow, box, canvas, save, text


OUTPUT = IMAGES / "runs.png"
TRUNK_LAYERS = 4  # that are drawn, of 11
STEP = 0.5  # from layer to layer
WIDTH = 0.4  # of a layer
HEIGHT = 0.5  # of a branch


def draw_hydra(panel: Axes, x: float, middle: float, members: Sequence[int], look: Look) -> None:
    """Draw a trunk with a branch for each member behind it; `middle` is the height of its middle."""
    side = max(1.4, len(members) * (HEIGHT + 0.1) - 0.1)
    for index in range(TRUNK_LAYERS):
        box(panel, x + STEP * index, middle - side / 2, WIDTH, side, look.faded, look.shared)
    behind = x + STEP * TRUNK_LAYERS
    for index, member in enumerate(members):
        bottom = middle + side / 2 - HEIGHT - index * (side - HEIGHT) / (len(members) - 1)
        colour = look.members[member]
        arrow(panel, (behind - 0.08, bottom + HEIGHT / 2), (behind + 0.3, bottom + HEIGHT / 2), colour)
        box(panel, behind + 0.35, bottom, WIDTH, HEIGHT, colour, look.tints[member])
        box(panel, behind + 0.87, bottom, WIDTH, HEIGHT, colour, colour)


def draw(look: Look) -> Figure:
    figure, panel = canvas(look, 5.5)
    # The runs, one above the other
    text(panel, 2.4, 5.2, "two runs of three members", look.ink, NORMAL, weight="bold")
    for name, middle, members in (("run 1", 3.75, (0, 1, 2)), ("run 2", 1.75, (3, 4, 5))):
        draw_hydra(panel, 0.9, middle, members, look)
        text(panel, 0.42, middle, name, look.ink)
    text(panel, 1.85, 0.5, "trunk", look.ink)
    text(panel, 3.6, 0.5, "branches", look.ink)

    # What they become
    arrow(panel, (4.6, 2.75), (5.3, 2.75), look.ink)
    text(panel, 4.95, 3.02, "fuse", look.ink)
    text(panel, 7.6, 5.2, "one model, at the cost of about one", look.ink, NORMAL, weight="bold")
    draw_hydra(panel, 5.8, 2.75, range(6), look)
    text(panel, 6.55, 0.5, "mean of both trunks", look.ink)
    text(panel, 8.85, 0.5, "all six branches", look.ink)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    save(draw, output)


if __name__ == "__main__":
    main()
