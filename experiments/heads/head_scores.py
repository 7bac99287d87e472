"""Scores of heads by layer, CLIP's towers side by side (C.3, figure 7)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra_transformers.pruning import HeadMap
from hydra_transformers.pruning.heads import Head, tower_and_place
from hydra_transformers.reports.table import markdown_table


@dataclass(frozen=True)
class HeadScores:
    """Scores of heads, for example those of `taylor_scores`.

    scores: `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`
    """

    scores: Mapping[Head, float]

    def __post_init__(self) -> None:
        if not isinstance(self.scores, Mapping) or not self.scores:
            raise TypeError(f"scores is a {type(self.scores).__name__}: pass {{head: score}}, at least one")
        lengths = {len(head) if isinstance(head, tuple) else 0 for head in self.scores}
        if lengths not in ({2}, {3}):
            raise TypeError(
                "scores has keys that are no heads: pass {(layer, head): score}, for two towers {(tower, layer, head): score}"
            )

    def by_layer(self) -> dict[str, dict[int, list[float]]]:
        """Tower ("" if there is one) -> layer -> scores"""
        found: dict[str, dict[int, list[float]]] = {}
        for head in sorted(self.scores, key=lambda head: (head[0] == "text", head)):
            tower, layer, _ = tower_and_place(head)
            found.setdefault(tower, {}).setdefault(layer, []).append(self.scores[head])
        return found

    def ratios(self) -> dict[int, float]:
        """For CLIP, layer -> the vision tower's mean score / the text tower's, for layers that both have."""
        towers = self.by_layer()
        if set(towers) != {"vision", "text"}:
            return {}
        shared = [layer for layer in towers["vision"] if _mean(towers["text"].get(layer, [0.0])) != 0]
        return {layer: _mean(towers["vision"][layer]) / _mean(towers["text"][layer]) for layer in shared}

    def to_dict(self) -> dict[str, Any]:
        return {"scores": [[*head, score] for head, score in self.scores.items()], "ratios": self.ratios()}

    def to_markdown(self) -> str:
        """By layer, the mean score of a head and its range."""
        towers, ratios = self.by_layer(), self.ratios()
        rows = []
        for layer in sorted({layer for layers in towers.values() for layer in layers}):
            row = [str(layer)]
            for scores in (layers.get(layer) for layers in towers.values()):
                row.append("-" if scores is None else f"{_mean(scores):.3g} ({min(scores):.3g} to {max(scores):.3g})")
            if ratios:
                row.append(f"{ratios[layer]:.2f}" if layer in ratios else "-")
            rows.append(row)
        heading = ["Layer", *(tower or "Mean (lowest to highest)" for tower in towers)]
        return markdown_table(heading + ["vision / text"] * bool(ratios), rows) + "\n"

    def head_map(self) -> HeadMap:
        return HeadMap({"score": self.scores})

    def _repr_html_(self) -> str:
        return self.head_map()._repr_html_()

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `scores.png`, every head's score by layer and head, and returns its path."""
        from .head_plots import draw_scores

        return draw_scores(self, folder)


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)
