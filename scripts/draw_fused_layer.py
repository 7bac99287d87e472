"""Draws docs/images/fused-layer.png: one layer of three pruned members, and the fused layer that computes them at once.

python -m scripts.draw_fused_layer [OUTPUT]
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .picture_style import IMAGES, NORMAL, SMALL, Look, arrow, box, canvas, save, text


OUTPUT = IMAGES / "fused-layer.png"
KEPT = ((0, 1, 3, 4), (0, 2, 3, 5), (1, 2, 4))  # of six heads, by member
HEADS = 6
SIDE = 0.38  # of a head
STEP = 0.45  # from head to head


def draw_members(panel: Axes, look: Look) -> None:
    """Draw the same layer of three members, each without some heads."""
    text(panel, 2.15, 4.75, "a layer of three members", look.ink, NORMAL, weight="bold")
    text(panel, 2.15, 4.4, "other heads cut out of each", look.ink)
    for member, kept in enumerate(KEPT):
        y = 3.3 - 1.15 * member
        colour = look.members[member]
        for head in range(HEADS):
            edge = look.pale
            fill = look.ground
            style = "dashed"
            if head in kept:
                edge = colour
                fill = look.tints[member]
                style = "solid"
            box(panel, 0.15 + STEP * head, y, SIDE, SIDE, edge, fill, linestyle=style)
        arrow(panel, (2.87, y + SIDE / 2), (3.17, y + SIDE / 2), colour)
        box(panel, 3.22, y - 0.06, 0.9, SIDE + 0.12, colour, look.ground)
        text(panel, 3.67, y + SIDE / 2, "MLP", look.ink)


def draw_fused(panel: Axes, look: Look) -> None:
    """Draw all heads that are left side by side, and one MLP."""
    text(panel, 7.55, 4.75, "the fused layer", look.ink, NORMAL, weight="bold")
    text(panel, 7.55, 4.4, f"all {sum(map(len, KEPT))} heads at once, one MLP", look.ink)
    x = 5.25
    for member, kept in enumerate(KEPT):
        for _ in kept:
            box(panel, x, 2.75, 0.31, 0.75, look.members[member], look.tints[member])
            x += 0.38
        x += 0.12
    right = x - 0.19
    middle = (5.25 + right) / 2
    text(panel, middle, 3.78, "no head sees another member's", look.ink)
    arrow(panel, (middle, 2.68), (middle, 2.2), look.ink)
    box(panel, 5.25, 1.45, right - 5.25, 0.68, look.faded, look.shared)
    text(panel, middle, 1.79, "the mean of the members' MLPs", look.ink)
    arrow(panel, (middle, 1.38), (middle, 0.95), look.ink)
    text(panel, middle, 0.66, "a prediction of each member", look.ink)


def draw(look: Look) -> Figure:
    figure, panel = canvas(look, 5.0)
    draw_members(panel, look)
    arrow(panel, (4.35, 2.35), (5.0, 2.35), look.ink)
    text(panel, 4.67, 2.62, "fuse", look.ink, SMALL)
    draw_fused(panel, look)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    save(draw, output)


if __name__ == "__main__":
    main()
