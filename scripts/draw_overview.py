"""Draws docs/images/overview.png, the picture that explains Hydra Ensembles in the README.

python scripts/draw_overview.py [OUTPUT]
"""

import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle


OUTPUT = Path(__file__).parents[1] / "docs" / "images" / "overview.png"
LAYERS, HEADS = 4, 6
MEMBER_COLOURS = ("#0072B2", "#D55E00", "#009E73")  # told apart by colour-blind readers too
GREY, INK, SHARED = "#9AA5B1", "#1F2933", "#E4E7EB"
# kept[member][layer]: head sets such as pruning leaves them
KEPT = (
    ((0, 1, 3, 5), (0, 2, 3, 4), (1, 2, 4, 5), (0, 1, 2, 4)),
    ((0, 2, 3, 4), (1, 2, 4, 5), (0, 1, 3), (1, 2, 3, 4, 5)),
    ((1, 2, 4, 5), (0, 1, 3, 5), (0, 2, 3, 5), (0, 3, 4, 5)),
)
PROBABILITIES = {
    "Known": ((0.92, 0.05, 0.03), (0.94, 0.04, 0.02), (0.90, 0.06, 0.04)),
    "Unknown": ((0.75, 0.15, 0.10), (0.12, 0.70, 0.18), (0.22, 0.18, 0.60)),
}


def box(panel: Axes, x: float, y: float, width: float, height: float, edge: str, fill: str = "white") -> None:
    style = "round,pad=0,rounding_size=0.12"
    panel.add_patch(FancyBboxPatch((x, y), width, height, style, facecolor=fill, edgecolor=edge, linewidth=1.6))


def heads(panel: Axes, x: float, y: float, size: float, kept: tuple | None, colour: str) -> None:
    """A grid of heads, one row per layer; pruned ones are left as outlines."""
    for layer in range(LAYERS):
        for head in range(HEADS):
            is_kept = kept is None or head in kept[layer]
            look = (
                {"facecolor": colour, "edgecolor": colour}
                if is_kept
                else {"facecolor": "white", "edgecolor": "#CBD2D9"}
            )
            corner = (x + head * size, y + layer * size)
            panel.add_patch(Rectangle(corner, 0.76 * size, 0.76 * size, linewidth=0.9, **look))


def fused_layers(panel: Axes, x: float, y: float, size: float, gap: float) -> None:
    """Per layer a row with the kept heads of all members side by side, above the MLP that they share."""
    for layer in range(LAYERS):
        bottom = y + layer * (2 * size + gap)
        panel.add_patch(
            Rectangle((x, bottom), 13.6 * size, 0.62 * size, facecolor=SHARED, edgecolor="#CBD2D9", linewidth=0.9)
        )
        left = x
        for member, colour in enumerate(MEMBER_COLOURS):
            for _ in KEPT[member][layer]:
                corner = (left, bottom + 0.86 * size)
                panel.add_patch(Rectangle(corner, 0.76 * size, 0.76 * size, facecolor=colour, edgecolor=colour))
                left += size
            left += 0.3 * size


def arrow(panel: Axes, start: tuple[float, float], end: tuple[float, float], colour: str = GREY) -> None:
    look = {"arrowstyle": "-|>", "mutation_scale": 15, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0}
    panel.add_patch(FancyArrowPatch(start, end, color=colour, **look))


def text(panel: Axes, x: float, y: float, words: str, size: float = 11, **look) -> None:
    look = {"ha": "center", "va": "center", "color": INK, "linespacing": 1.35, **look}
    panel.text(x, y, words, fontsize=size, **look)


def answer(panel: Axes, x: float, y: float, name: str, verdict: str) -> None:
    """The members' probabilities of three classes as thin bars, their mean as a frame around them."""
    members = PROBABILITIES[name]
    for label in range(3):
        left = x + label * 0.62
        for member, colour in enumerate(MEMBER_COLOURS):
            panel.add_patch(
                Rectangle((left + 0.15 * member, y), 0.12, 0.95 * members[member][label], facecolor=colour)
            )
        mean = sum(member[label] for member in members) / 3
        panel.plot([left - 0.05, left + 0.47], [y + 0.95 * mean] * 2, color=INK, linewidth=1.8)
    panel.plot([x - 0.1, x + 1.8], [y, y], color=GREY, linewidth=1)
    text(panel, x + 1.95, y + 0.45, verdict, size=10, ha="left", weight="bold")


TITLES = (
    (1.5, "1. One trained\ntransformer"),
    (5.15, "2. Copies, each with\ndifferent heads cut out"),
    (9.35, "3. Fused:\none model, one pass"),
    (13.9, "4. The mean answer,\nand how uncertain it is"),
)


def draw() -> Figure:
    figure = Figure(figsize=(11.2, 4.4), dpi=160)
    panel = figure.add_axes((0, 0, 1, 1))
    panel.set(xlim=(0, 16.6), ylim=(0, 6.28))
    panel.axis("off")
    for x, title in TITLES:
        text(panel, x, 5.78, title, size=11.5, weight="bold")

    box(panel, 0.5, 1.83, 2.0, 1.65, GREY)
    heads(panel, 0.68, 2.1, 0.28, None, "#52606D")
    text(panel, 1.5, 1.55, "its heads, layer by layer", size=9)

    for member, colour in enumerate(MEMBER_COLOURS):
        bottom = 3.7 - 1.62 * member
        box(panel, 4.3, bottom, 1.8, 1.38, colour)
        heads(panel, 4.48, bottom + 0.22, 0.25, KEPT[member], colour)
        arrow(panel, (2.62, 2.65), (4.2, bottom + 0.69))
        arrow(panel, (6.2, bottom + 0.69), (7.5, 2.77 + 0.4 * (1 - member)), colour)

    box(panel, 7.6, 0.46, 3.5, 4.62, INK)
    text(panel, 9.35, 4.78, "heads of all members, side by side", size=9)
    fused_layers(panel, 7.87, 1.08, 0.22, 0.4)
    text(panel, 9.35, 0.74, "grey: shared by all members", size=9)
    arrow(panel, (11.2, 3.35), (12.1, 3.85))
    arrow(panel, (11.2, 2.2), (12.1, 1.7))

    text(panel, 12.3, 4.78, "an input like the training data", size=9, ha="left")
    answer(panel, 12.4, 3.5, "Known", "they agree:\nlow uncertainty")
    text(panel, 12.3, 2.45, "an input unlike it", size=9, ha="left")
    answer(panel, 12.4, 1.3, "Unknown", "they disagree:\nhigh uncertainty")
    text(panel, 12.3, 0.74, "bars: each member; black: the mean", size=9, ha="left")
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.parent.mkdir(parents=True, exist_ok=True)
    draw().savefig(output, facecolor="white", metadata={"Software": None})
    print(f"wrote {output}")


if __name__ == "__main__":
    main()
