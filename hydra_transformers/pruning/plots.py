"""A circuit as a picture."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from .._io.pictures import COLOURS, Figure, write_png


if TYPE_CHECKING:
    from .circuits import Circuit

SCORES = {"acc": "accuracy", "ood": "AUROC of foreign data", "avg": "mean of accuracy and AUROC"}


def draw_circuit(circuit: "Circuit", path: str | os.PathLike) -> Path:
    """The score after each removal, the score of all heads, and the number of removals after which it is best."""
    figure = Figure(figsize=(6, 3.6), layout="constrained")
    axes = figure.subplots()
    scores = [circuit.dense_score, *circuit.scores]
    axes.plot(range(len(scores)), scores, "-o", color=COLOURS[0], markersize=3)
    axes.axhline(circuit.dense_score, color=COLOURS[7], linestyle=":", label=f"all heads: {circuit.dense_score:.3f}")
    best = circuit.best_budget
    axes.plot(best, scores[best], "D", color=COLOURS[1], label=f"best: {scores[best]:.3f} without {best}")
    if circuit.chance_from is not None:
        axes.axvspan(circuit.chance_from, len(scores) - 1, color=COLOURS[7], alpha=0.2, label="no better than chance")
    name = SCORES.get(circuit.objective) or circuit.made_from.get("metric", circuit.objective)
    axes.set(xlabel="heads removed", ylabel=name)
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    return write_png(figure, path)
