"""Draws docs/images/runs.png: two runs of three members, and what becomes of them when they are fused.

python scripts/draw_runs.py [OUTPUT]
"""

import sys
from pathlib import Path

from draw_overview import GREY, INK, MEMBER_COLOURS, MEMBER_TINTS, SHARED, arrow, layer, text
from matplotlib.axes import Axes
from matplotlib.figure import Figure


OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "runs.png"
TRUNK_LAYERS = 4  # that are drawn, of 11
STEP = 0.62  # from layer to layer
HEIGHT = 0.5  # of a branch
SECOND_COLOURS = ("#56B4E9", "#E69F00", "#CC79A7")
SECOND_TINTS = ("#E3F3FC", "#FCF0D9", "#F7E9F1")


def hydra(panel: Axes, x: float, middle: float, colours: tuple, tints: tuple, trunk: str) -> None:
    """Draw a trunk with a branch for each colour behind it; `middle` is the height of its middle."""
    side = max(1.3, len(colours) * (HEIGHT + 0.1) - 0.1)
    for index in range(TRUNK_LAYERS):
        layer(panel, x + STEP * index, middle - side / 2, side, GREY, trunk)
    behind = x + STEP * TRUNK_LAYERS
    for index, (colour, tint) in enumerate(zip(colours, tints, strict=True)):
        bottom = middle + side / 2 - HEIGHT - index * (side - HEIGHT) / max(1, len(colours) - 1)
        layer(panel, behind + 0.35, bottom, HEIGHT, colour, tint)
        arrow(panel, (behind - 0.1, bottom + HEIGHT / 2), (behind + 0.33, bottom + HEIGHT / 2), colour)
        layer(panel, behind + 0.97, bottom, HEIGHT, colour, "white")


def main() -> None:
    figure = Figure(figsize=(10, 4.8), dpi=160)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(0, 10)
    panel.set_ylim(-0.3, 4.5)
    panel.axis("off")

    # The runs, one above the other
    hydra(panel, 0.8, 3.1, MEMBER_COLOURS, MEMBER_TINTS, "#DCE6EE")
    hydra(panel, 0.8, 1.1, SECOND_COLOURS, SECOND_TINTS, "#F3E9DC")
    text(panel, 2.8, 4.25, "runs=2, num_members=3", size=10.5, family="monospace")
    text(panel, 0.35, 3.1, "run 1", size=10)
    text(panel, 0.35, 1.1, "run 2", size=10)
    text(panel, 2.0, -0.05, "trunk_layers", size=10.5, family="monospace")
    text(panel, 4.15, -0.05, "three branches each", size=10)

    # What they become
    arrow(panel, (5.05, 2.1), (5.6, 2.1), INK)
    text(panel, 5.32, 2.35, "fuse", size=10)
    hydra(panel, 5.85, 2.1, (*MEMBER_COLOURS, *SECOND_COLOURS), (*MEMBER_TINTS, *SECOND_TINTS), SHARED)
    text(panel, 7.75, 4.25, "one model, at the cost of about one", size=10)
    text(panel, 7.05, -0.05, "the mean of both trunks", size=10)
    text(panel, 9.2, -0.05, "six branches", size=10)

    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    figure.savefig(output, facecolor="white")


if __name__ == "__main__":
    main()
