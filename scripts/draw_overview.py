"""Draws docs/images/overview.png, the picture that explains Hydra Ensembles in the README.

python scripts/draw_overview.py [OUTPUT]
"""

import math
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle


OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "overview.png"
LAYERS, HEADS = 4, 6
MEMBER_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # told apart by colour-blind readers too
MEMBER_TINTS = ("#B3D4E8", "#F2CCB3", "#B3E2D5")
GREY, INK, SHARED, PALE = "#9AA5B1", "#1F2933", "#D3D9DF", "#CBD2D9"
# kept[member][layer]: head sets such as pruning leaves them
KEPT = (
    ((0, 1, 3, 5), (0, 2, 3, 4), (1, 2, 4, 5), (0, 1, 2, 4)),
    ((0, 2, 3, 4), (1, 2, 4, 5), (0, 1, 3), (1, 2, 3, 4, 5)),
    ((1, 2, 4, 5), (0, 1, 3, 5), (0, 2, 3, 5), (0, 3, 4, 5)),
)
CLASSES = ("cat", "dog", "fox")
# by member and class
PROBABILITIES = {
    "known": ((0.92, 0.05, 0.03), (0.94, 0.04, 0.02), (0.90, 0.06, 0.04)),
    "unknown": ((0.75, 0.15, 0.10), (0.12, 0.70, 0.18), (0.22, 0.18, 0.60)),
}


def box(panel: Axes, x: float, y: float, width: float, height: float, edge: str, fill: str = "white") -> None:
    style = "round,pad=0,rounding_size=0.12"
    panel.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=fill, edgecolor=edge, linewidth=1.6))


def bar(panel: Axes, x: float, y: float, width: float, height: float, fill: str, edge: str | None = None) -> None:
    panel.add_patch(Rectangle((x, y), width, height, facecolor=fill, edgecolor=edge or fill, linewidth=0.9))


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    look = {"arrowstyle": "-|>", "mutation_scale": 15, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    panel.add_patch(FancyArrowPatch(start, end, color=colour, **look))


def text(panel: Axes, x: float, y: float, words: str, size: float = 11, **look) -> None:
    look = {"ha": "center", "va": "center", "color": INK, "linespacing": 1.35, **look}
    panel.text(x, y, words, fontsize=size, **look)


def model(panel: Axes, x: float, y: float, member: int, kept: tuple | None = None) -> None:
    """A transformer: per layer its heads below its MLP; those that are cut out are left as outlines."""
    colour, tint, size = MEMBER_COLOURS[member], MEMBER_TINTS[member], 0.25
    box(panel, x, y, 1.84, 1.4, colour)
    for layer in range(LAYERS):
        bottom = y + 0.12 + 0.3 * layer
        bar(panel, x + 0.19, bottom + 0.19, (HEADS - 0.24) * size, 0.06, tint)
        for head in range(HEADS):
            is_kept = kept is None or head in kept[layer]
            look = (colour, colour) if is_kept else ("white", PALE)
            bar(panel, x + 0.19 + head * size, bottom, 0.76 * size, 0.16, *look)


def common(panel: Axes, x: float, y: float, width: float, name: str) -> None:
    bar(panel, x, y, width, 0.22, SHARED, PALE)
    text(panel, x + width / 2, y + 0.1, name, size=7.5)


def fused(panel: Axes, x: float, y: float) -> None:
    """Per layer the kept heads of all members side by side, below the MLP that they share; a classifier for each."""
    size, width = 0.22, 2.99
    common(panel, x, y, width, "embeddings")
    for layer in range(LAYERS):
        bottom, left = y + 0.58 + 0.73 * layer, x
        for member, colour in enumerate(MEMBER_COLOURS):
            for _ in KEPT[member][layer]:
                bar(panel, left, bottom, 0.76 * size, 0.76 * size, colour)
                left += size
            left += 0.3 * size
        common(panel, x, bottom + 0.24, width, "MLP")
    for member, colour in enumerate(MEMBER_COLOURS):
        bar(panel, x + 1.045 * member, y + 3.5, 0.9, 0.16, colour)


def answer(panel: Axes, x: float, y: float, name: str, agreement: str, says: str) -> None:
    """The members' probabilities of each class as bars, their mean as a line, and what the model says."""
    members = PROBABILITIES[name]
    mean = [sum(member[label] for member in members) / len(members) for label in range(len(CLASSES))]
    for label, called in enumerate(CLASSES):
        left = x + label * 0.62
        for member, colour in enumerate(MEMBER_COLOURS):
            bar(panel, left + 0.15 * member, y, 0.12, 0.95 * members[member][label], colour)
        panel.plot([left - 0.05, left + 0.47], [y + 0.95 * mean[label]] * 2, color=INK, linewidth=1.8)
        text(panel, left + 0.21, y - 0.24, called, size=9, va="baseline")
    panel.plot([x - 0.1, x + 1.8], [y, y], color=GREY, linewidth=1)
    entropy = -sum(share * math.log(share) for share in mean)
    text(panel, x + 2.0, y + 0.72, f"{agreement}:\nuncertainty {entropy:.1f}", size=9, ha="left")
    text(panel, x + 2.0, y + 0.08, says, size=11.5, ha="left", weight="bold")


TITLES = (
    (1.66, "1. Three fine-tunings\nof one model"),
    (5.0, "2. Optional: different\nheads are cut out"),
    (9.1, "3. Fused:\none model, one pass"),
    (14.0, "4. An answer,\nor “I don't know”"),
)


def draw() -> Figure:
    figure = Figure(figsize=(11.2, 4.4), dpi=160)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 16.6), ylim=(0, 6.28))
    panel.axis("off")
    for x, title in TITLES:
        text(panel, x, 5.78, title, size=11.5, weight="bold")

    for member, colour in enumerate(MEMBER_COLOURS):
        bottom = 3.68 - 1.62 * member
        model(panel, 0.74, bottom, member)
        model(panel, 4.08, bottom, member, KEPT[member])
        arrow(panel, (2.7, bottom + 0.7), (3.96, bottom + 0.7), colour)
        arrow(panel, (6.04, bottom + 0.7), (7.2, 2.77 + 0.4 * (1 - member)), colour)
    text(panel, 1.66, 0.2, "or one model, three times", size=9)
    text(panel, 5.0, 0.2, "squares: heads; bars: MLPs", size=9)

    box(panel, 7.3, 0.44, 3.6, 4.64, INK)
    text(panel, 9.1, 4.83, "each its own attention and classifier", size=9)
    fused(panel, 7.605, 0.96)
    text(panel, 9.1, 0.7, "grey: common, the mean of theirs", size=9)
    arrow(panel, (11.02, 3.35), (11.85, 3.85))
    arrow(panel, (11.02, 2.2), (11.85, 1.7))

    text(panel, 12.1, 4.83, "an input like the training data", size=9, ha="left")
    answer(panel, 12.2, 3.5, "known", "they agree", f"“{CLASSES[0]}”")
    text(panel, 12.1, 2.55, "an input unlike it", size=9, ha="left")
    answer(panel, 12.2, 1.3, "unknown", "they disagree", "“I don't know”")
    text(panel, 12.1, 0.7, "bars: each member; black: the mean", size=9, ha="left")
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(output, facecolor="white", metadata={"Software": None})
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
