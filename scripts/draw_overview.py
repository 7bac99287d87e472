"""Draws docs/images/overview.png, the picture that explains Hydra Ensembles in the README.

python scripts/draw_overview.py [OUTPUT]
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle


OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "overview.png"
MEMBER_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # told apart by colour-blind readers too
MEMBER_TINTS = ("#D9EAF4", "#F9E6DA", "#D9F0E9")
GREY, INK, SHARED, PALE = "#9AA5B1", "#1F2933", "#E4E7EB", "#CBD2D9"
CLASSES = ("cat", "dog", "fox")
# by input, member and class
PROBABILITIES = {
    "familiar": ((0.92, 0.05, 0.03), (0.94, 0.04, 0.02), (0.90, 0.06, 0.04)),
    "unfamiliar": ((0.75, 0.15, 0.10), (0.12, 0.70, 0.18), (0.22, 0.18, 0.60)),
}
TRUNK_LAYERS, BRANCH_LAYERS = 5, 2
BRANCHES = (3.42, 2.02, 0.62)  # where they lie, from below


def box(panel: Axes, x: float, y: float, width: float, height: float, edge: str, fill: str = "white") -> None:
    style = "round,pad=0,rounding_size=0.1"
    panel.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=fill, edgecolor=edge, linewidth=1.5))


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    look = {"arrowstyle": "-|>", "mutation_scale": 14, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    panel.add_patch(FancyArrowPatch(start, end, color=colour, **look))


def text(panel: Axes, x: float, y: float, words: str, size: float = 10.5, **look: str) -> None:
    panel.text(
        x, y, words, fontsize=size, **{"ha": "center", "va": "center", "color": INK, "linespacing": 1.35} | look
    )


def layer(panel: Axes, x: float, y: float, height: float, edge: str, fill: str, name: str = "") -> None:
    """A transformer layer, on end."""
    box(panel, x, y, 0.5, height, edge, fill)
    text(panel, x + 0.25, y + height / 2, name, size=9, rotation="vertical")


def answer(panel: Axes, x: float, y: float, name: str, agreement: str, says: str) -> None:
    """The members' probabilities of each class as bars, their mean as a line, and what the model says."""
    members = PROBABILITIES[name]
    for label, called in enumerate(CLASSES):
        left, shares = x + 0.68 * label, [member[label] for member in members]
        for member, colour in enumerate(MEMBER_COLOURS):
            panel.add_patch(Rectangle((left + 0.16 * member, y), 0.13, shares[member], facecolor=colour))
        mean = sum(shares) / len(shares)
        panel.plot([left - 0.05, left + 0.5], [y + mean] * 2, color=INK, linewidth=1.8)
        text(panel, left + 0.22, y - 0.27, called, size=9.5, va="baseline")
    panel.plot([x - 0.1, x + 2.0], [y, y], color=GREY, linewidth=1)
    text(panel, x + 2.25, y + 0.78, agreement, ha="left")
    text(panel, x + 2.25, y + 0.3, says, size=14, ha="left", weight="bold")


def draw() -> Figure:
    figure = Figure(figsize=(11.2, 4.2), dpi=160)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 16), ylim=(0, 6))
    panel.axis("off")
    for x, title in ((4.55, "One model, one pass"), (12.9, "An answer, or “I don't know”")):
        text(panel, x, 5.6, title, size=13.5, weight="bold")

    text(panel, 0.62, 2.62, "an\ninput")
    arrow(panel, (1.05, 2.62), (1.5, 2.62))
    for place in range(TRUNK_LAYERS):
        layer(panel, 1.6 + 0.62 * place, 0.62, 4.0, GREY, SHARED, "" if place else "embeddings")
    text(panel, 3.1, 4.94, "a shared trunk: most layers, computed once")
    trunk_end = 1.6 + 0.62 * TRUNK_LAYERS
    for member, bottom in enumerate(BRANCHES):
        colour, tint, middle = MEMBER_COLOURS[member], MEMBER_TINTS[member], bottom + 0.6
        arrow(panel, (trunk_end, middle), (trunk_end + 0.5, middle), colour)
        for place in range(BRANCH_LAYERS):
            layer(panel, trunk_end + 0.6 + 0.62 * place, bottom, 1.2, colour, tint)
        layer(panel, trunk_end + 0.6 + 0.62 * BRANCH_LAYERS, bottom, 1.2, colour, colour)
        text(
            panel, trunk_end + 0.85 + 0.62 * BRANCH_LAYERS, middle, "classifier", 8, rotation="vertical", color="white"
        )
        arrow(panel, (trunk_end + 2.4, middle), (trunk_end + 2.95, middle), colour)
    text(panel, trunk_end + 1.47, 0.24, "three branches: the last layers")

    for bottom, name, about, agreement, says in (
        (3.4, "familiar", "a familiar input", "the branches agree", "“cat”"),
        (1.1, "unfamiliar", "an unfamiliar input", "they disagree", "“I don't know”"),
    ):
        box(panel, 8.1, bottom - 0.48, 7.6, 1.98, PALE)
        text(panel, 8.35, bottom + 1.18, about, ha="left", style="italic")
        answer(panel, 10.75, bottom, name, agreement, says)
    text(panel, 11.9, 0.24, "bars: each branch's probabilities; black: their mean", size=9.5)
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(output, facecolor="white", metadata={"Software": None})
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
