"""Draws docs/images/fused-layer.png: one layer of three pruned members, and the fused layer that computes them at once.

python scripts/draw_fused_layer.py [OUTPUT]
"""

import sys
from pathlib import Path

from draw_overview import GREY, INK, MEMBER_COLOURS, MEMBER_TINTS, SHARED, arrow, text
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch


OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "fused-layer.png"
KEPT = ((0, 1, 3, 4), (0, 2, 3, 5), (1, 2, 4))  # of six heads, by member
HEADS = 6
SIDE, GAP = 0.42, 0.08


def square(panel: Axes, x: float, y: float, edge: str, fill: str, style: str = "solid") -> None:
    look = {"facecolor": fill, "edgecolor": edge, "linewidth": 1.5, "linestyle": style}
    panel.add_patch(FancyBboxPatch((x, y), SIDE, SIDE, "round,pad=0,rounding_size=0.06", **look))


def bar(panel: Axes, x: float, y: float, width: float, edge: str, fill: str, name: str) -> None:
    look = {"facecolor": fill, "edgecolor": edge, "linewidth": 1.5}
    panel.add_patch(FancyBboxPatch((x, y), width, SIDE, "round,pad=0,rounding_size=0.06", **look))
    text(panel, x + width / 2, y + SIDE / 2, name, size=9.5)


def main() -> None:
    figure = Figure(figsize=(10, 4.1), dpi=160)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set_xlim(0, 10)
    panel.set_ylim(0, 4.1)
    panel.axis("off")

    # The same layer of three members, each without some heads
    text(panel, 2.3, 3.85, "one layer of three members: some heads are cut out of each", size=10)
    for member, kept in enumerate(KEPT):
        y = 2.85 - 1.2 * member
        colour, tint = MEMBER_COLOURS[member], MEMBER_TINTS[member]
        for head in range(HEADS):
            x = 0.2 + head * (SIDE + GAP)
            if head in kept:
                square(panel, x, y, colour, tint)
            else:
                square(panel, x, y, "#CBD2D9", "white", "dashed")
        bar(panel, 3.45, y, 1.15, colour, "white", "MLP")
        arrow(panel, (3.2, y + SIDE / 2), (3.43, y + SIDE / 2), colour)

    arrow(panel, (4.85, 1.86), (5.45, 1.86), INK)
    text(panel, 5.15, 2.12, "fuse", size=10)

    # All heads that are left, side by side, and one MLP
    text(panel, 7.7, 3.85, "one layer of the Hydra: all heads at once, one MLP", size=10)
    count = sum(map(len, KEPT))
    small = 0.28
    place = 5.7
    for member, kept in enumerate(KEPT):
        for _ in kept:
            look = {"facecolor": MEMBER_TINTS[member], "edgecolor": MEMBER_COLOURS[member], "linewidth": 1.5}
            panel.add_patch(FancyBboxPatch((place, 1.9), small, 0.55, "round,pad=0,rounding_size=0.05", **look))
            place += small + 0.06
        place += 0.1
    width = place - 0.16 - 5.7
    bar(panel, 5.7, 0.95, width, GREY, SHARED, "the mean of the members' MLPs")
    arrow(panel, (5.7 + width / 2, 1.87), (5.7 + width / 2, 1.4), INK)
    text(panel, 5.7 + width / 2, 2.75, f"{count} heads, grouped by member: no head sees another member's", size=9.5)
    text(panel, 5.7 + width / 2, 0.55, "one forward pass gives a prediction of each member", size=9.5)

    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    figure.savefig(output, facecolor="white")


if __name__ == "__main__":
    main()
