"""Scores of heads by layer, the towers of CLIP side by side (C.3, figure 7)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..pruning import HeadMap
from ..pruning.heads import Head, tower_and_place
from ..reports.table import Table


@dataclass(frozen=True)
class HeadScores:
    """Scores of heads, of `taylor_scores` for example.

    scores: `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`
    """

    scores: Mapping[Head, float]

    def __post_init__(self):
        if not isinstance(self.scores, Mapping) or not self.scores:
            raise TypeError(f"scores is a {type(self.scores).__name__}: pass {{head: score}}, at least one")
        lengths = {len(head) if isinstance(head, tuple) else 0 for head in self.scores}
        if lengths not in ({2}, {3}):
            raise TypeError(
                "scores has keys that are no heads: pass {(layer, head): score}, for two towers {(tower, layer, head): score}"
            )

    def by_layer(self) -> dict[str, dict[int, list[float]]]:
        """Tower ("" where there is one) -> layer -> the scores of its heads, in order."""
        found: dict[str, dict[int, list[float]]] = {}
        for head in sorted(self.scores, key=lambda head: (head[0] == "text", head)):
            tower, layer, _ = tower_and_place(head)
            found.setdefault(tower, {}).setdefault(layer, []).append(self.scores[head])
        return found

    def ratios(self) -> dict[int, float]:
        """For CLIP, by layer the vision tower's mean score as a multiple of the text tower's, where both have the layer."""
        towers = self.by_layer()
        if set(towers) != {"vision", "text"}:
            return {}
        shared = [layer for layer in towers["vision"] if _mean(towers["text"].get(layer, [0.0])) != 0]
        return {layer: _mean(towers["vision"][layer]) / _mean(towers["text"][layer]) for layer in shared}

    def to_dict(self) -> dict[str, Any]:
        return {"scores": [[*head, score] for head, score in self.scores.items()], "ratios": self.ratios()}

    def to_markdown(self) -> str:
        """By layer the mean score of a head and its range, the towers side by side."""
        towers, ratios = self.by_layer(), self.ratios()
        heading = [
            "Layer",
            *(tower or "Mean (lowest to highest)" for tower in towers),
            *(["vision / text"] if ratios else []),
        ]
        rows = []
        for layer in sorted({layer for of_tower in towers.values() for layer in of_tower}):
            cells = [_range(of_tower[layer]) if layer in of_tower else "-" for of_tower in towers.values()]
            rows.append(
                [str(layer), *cells, *([f"{ratios[layer]:.2f}" if layer in ratios else "-"] if ratios else [])]
            )
        return Table(heading, rows).markdown() + "\n"

    def head_map(self) -> HeadMap:
        return HeadMap({"score": self.scores})

    def _repr_html_(self) -> str:
        return self.head_map()._repr_html_()

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `scores.png`, every head's score in the order of layers and heads, and returns its path."""
        from .plots import draw_scores

        return draw_scores(self, folder)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def _range(values: list[float]) -> str:
    return f"{_mean(values):.3g} ({min(values):.3g} to {max(values):.3g})"
