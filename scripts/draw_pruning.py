"""Draws docs/images/pruning.png: the heads that three circuits of a ViT on digits remove, and what that does to it.

python -m scripts.draw_pruning [OUTPUT]
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from experiments.results import RESULTS
from hydra_transformers import HydraViTConfig
from hydra_transformers.pruning import Circuit

from .picture_style import IMAGES, NORMAL, SMALL, WIDTH, Look, save, style_axes


OUTPUT = IMAGES / "pruning.png"
CARD = RESULTS / "cards" / "hydra-vit-digits"
TITLES = {"acc": "for accuracy", "ood": "for detection", "avg": "for both"}


def read_circuits() -> list[Circuit]:
    return [Circuit.load(path) for path in sorted((CARD / "circuits").glob("*.json"))]


def draw_map(panel: Axes, circuit: Circuit, size: tuple[int, int], colour: str, tint: str, look: Look) -> None:
    """Draw a square for each head; a removed one has its place in the ranking."""
    layers, heads = size
    places = {(layer, head): place for place, (layer, head) in enumerate(circuit.ranking, start=1)}
    for layer in range(layers):
        for head in range(heads):
            place = places.get((layer, head))
            fill = tint if place is None else look.ground
            edge = colour if place is None else look.pale
            panel.add_patch(Rectangle((head + 0.06, layer + 0.06), 0.88, 0.88, facecolor=fill, edgecolor=edge))
            if place is not None:
                panel.text(
                    head + 0.5, layer + 0.52, str(place), ha="center", va="center", fontsize=SMALL, color=look.ink
                )
    panel.set(xlim=(0, heads), ylim=(layers, 0), aspect="equal")
    style_axes(panel, look, TITLES[str(circuit.objective)], f"{heads} heads", f"{layers} layers")
    panel.set(xticks=[], yticks=[])
    for side in panel.spines.values():
        side.set_visible(False)


def draw(circuits: Sequence[Circuit], size: tuple[int, int], look: Look) -> Figure:
    """Draw a map of the heads for each circuit, and below them the scores after each removal."""
    figure = Figure(figsize=(WIDTH, WIDTH * 0.88))
    figure.text(
        0.02, 0.955, "Which heads each circuit removes, in order", fontsize=NORMAL, color=look.ink, weight="bold"
    )
    for index, circuit in enumerate(circuits):
        panel = figure.add_axes((0.05 + 0.325 * index, 0.58, 0.285, 0.33))
        draw_map(panel, circuit, size, look.members[index], look.tints[index], look)
        if index:
            panel.set_ylabel("")

    panel = figure.add_axes((0.08, 0.1, 0.7, 0.34))
    for index, circuit in enumerate(circuits):
        scores = [100 * score for score in (circuit.dense_score, *circuit.scores)]
        colour = look.members[index]
        panel.plot(range(len(scores)), scores, "o-", color=colour, markersize=4, linewidth=1.8)
        last = {"fontsize": SMALL, "color": look.ink, "va": "center"}
        panel.annotate(
            TITLES[str(circuit.objective)], (len(scores) - 1, scores[-1]), (8, 0), textcoords="offset points", **last
        )
    style_axes(panel, look, "The score on validation rows after each removal, in %", "heads removed")
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def main() -> None:
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    circuits = read_circuits()
    config = HydraViTConfig.from_pretrained(CARD)
    size = (config.num_hidden_layers, config.num_attention_heads)
    numbers = "; ".join(f"{circuit.objective} {circuit.ranking} {circuit.scores}" for circuit in circuits)
    save(lambda look: draw(circuits, size, look), output, numbers)


if __name__ == "__main__":
    main()
