"""Draws docs/images/overview.png, the picture that explains Hydra Ensembles in the README.

python -m scripts.draw_overview [OUTPUT]
"""

import sys
from pathlib import Path
from statistics import mean

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from .picture_style import IMAGES, LARGE, Look, arrow, box, canvas, save, text


OUTPUT = IMAGES / "overview.png"
CLASSES = ("cat", "dog", "fox")
# by member and class
FAMILIAR = ((0.92, 0.05, 0.03), (0.95, 0.03, 0.02), (0.89, 0.07, 0.04))
UNFAMILIAR = ((0.61, 0.20, 0.19), (0.34, 0.44, 0.22), (0.25, 0.32, 0.43))
THRESHOLD = 0.7
TRUNK_LAYERS = 5
HEADS = 4
BRANCHES = (5.45, 4.5, 3.55)  # where they lie, from below
BAR = 1.5  # how high a probability of 1 is


def draw_model(panel: Axes, look: Look) -> None:
    """Draw the trunk, the branches with their heads, and the mean of their probabilities."""
    text(panel, 0.42, 4.85, "an\ninput", look.ink)
    arrow(panel, (0.8, 4.85), (1.15, 4.85), look.faded)
    for place in range(TRUNK_LAYERS):
        box(panel, 1.25 + 0.44 * place, 3.5, 0.34, 2.7, look.faded, look.shared)
    text(panel, 2.3, 6.5, "a shared trunk", look.ink)
    for member, bottom in enumerate(BRANCHES):
        colour = look.members[member]
        tint = look.tints[member]
        middle = bottom + 0.37
        arrow(panel, (3.45, middle), (3.85, middle), colour)
        # The heads of the branch's attention, side by side, and its classifier.
        box(panel, 3.95, bottom, 1.95, 0.75, colour, look.ground)
        for head in range(HEADS):
            box(panel, 4.07 + 0.45 * head, bottom + 0.17, 0.36, 0.41, colour, tint)
        box(panel, 6.05, bottom, 1.15, 0.75, colour, colour)
        text(panel, 6.62, middle, "classifier", look.ground)
        arrow(panel, (7.28, middle), (7.75, 4.85 + 0.5 * (middle - 4.87)), colour)
    text(panel, 5.6, 6.5, "branches with heads of their own", look.ink)
    box(panel, 7.85, 4.15, 1.95, 1.4, look.faded, look.shared)
    text(panel, 8.82, 4.85, "the mean of\ntheir prob-\nabilities", look.ink)


def draw_answer(panel: Axes, left: float, members: tuple, about: str, legend: str, look: Look) -> None:
    """Draw the mean probability of each class as a bar, the members' as dots, and what the model says."""
    box(panel, left, 0.12, 4.75, 2.85, look.pale, look.ground, zorder=1)
    text(panel, left + 0.2, 2.68, about, look.ink, style="italic", ha="left")
    bottom = 0.62
    means = [mean(member[label] for member in members) for label in range(len(CLASSES))]
    for label, name in enumerate(CLASSES):
        x = left + 0.25 + 0.62 * label
        panel.add_patch(Rectangle((x, bottom), 0.44, BAR * means[label], facecolor=look.pale, zorder=2))
        for member, shares in enumerate(members):
            dot = (x + 0.1 + 0.12 * member, bottom + BAR * shares[label])
            panel.plot(*dot, "o", markersize=5, color=look.members[member], zorder=3)
        text(panel, x + 0.22, bottom - 0.28, name, look.ink, va="baseline")
    panel.plot([left + 0.15, left + 2.05], [bottom, bottom], color=look.faded, linewidth=1)
    line = bottom + BAR * THRESHOLD
    panel.plot([left + 0.15, left + 2.2], [line, line], color=look.ink, linewidth=1.5, linestyle="--")
    text(panel, left + 2.28, line + 0.02, f"threshold, {THRESHOLD:.0%}", look.ink, ha="left")

    text(panel, left + 2.28, bottom - 0.22, legend, look.faded, ha="left")
    is_sure = max(means) >= THRESHOLD
    answer = f"“{CLASSES[means.index(max(means))]}”" if is_sure else "“I don't know”"
    side = "above it" if is_sure else "below it"
    text(panel, left + 2.28, line - 0.36, f"{max(means):.0%} is {side}:", look.ink, ha="left")
    text(panel, left + 2.28, line - 0.78, answer, look.ink, size=LARGE, ha="left", weight="bold")


def draw(look: Look) -> Figure:
    figure, panel = canvas(look, 7.0)
    draw_model(panel, look)
    draw_answer(panel, 0.15, FAMILIAR, "an input like the training data", "bars: the mean", look)
    draw_answer(panel, 5.1, UNFAMILIAR, "an input unlike it", "dots: the members", look)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    save(draw, output)


if __name__ == "__main__":
    main()
