"""Quality against measured time and memory, as a PNG file."""

import os
from collections.abc import Sequence
from pathlib import Path

from .._io.pictures import COLOURS, Figure, write_png
from .candidates import DEEP_ENSEMBLE, HYDRA, ONE_MODEL, SOUP, Candidate


LOOKS = {
    ONE_MODEL: ("o", COLOURS[6]),
    DEEP_ENSEMBLE: ("s", COLOURS[7]),
    SOUP: ("D", COLOURS[4]),
    HYDRA: ("^", COLOURS[0]),
}


def draw_candidates(
    candidates: Sequence[Candidate], front: Sequence[Candidate], chosen: Candidate, folder: str | os.PathLike
) -> list[Path]:
    """Writes `quality_against_cost.png`, and returns its path."""
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, cost in zip(panels, ("time", "memory"), strict=True):
        for kind, (marker, colour) in LOOKS.items():
            found = [each for each in candidates if each.design.kind == kind]
            if found:
                places = [getattr(each, cost) for each in found]
                panel.scatter(places, [100 * each.quality for each in found], marker=marker, color=colour, label=kind)
        ordered = sorted(front, key=lambda each: getattr(each, cost))
        places = [getattr(each, cost) for each in ordered]
        panel.plot(
            places, [100 * each.quality for each in ordered], color=COLOURS[7], linewidth=0.8, label="Pareto front"
        )
        panel.scatter(
            [getattr(chosen, cost)],
            [100 * chosen.quality],
            s=160,
            facecolors="none",
            edgecolors=COLOURS[1],
            label="chosen",
        )
        panel.set_xlabel(f"measured {cost}, one model's being 1")
        panel.grid(color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    measured = chosen.detection is not None
    panels[0].set_ylabel("quality: mean of accuracy and AUROC (%)" if measured else "quality: accuracy (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return [write_png(figure, Path(folder) / "quality_against_cost.png")]
