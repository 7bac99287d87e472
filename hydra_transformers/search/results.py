"""The result of `hydrate`: the chosen Hydra, all candidates as a table and a plot, and the folder that is written."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from .._io.files import write_atomically
from ..hub.card import create_model_card
from ..pruning import Circuit
from ..reports.gains import Gain
from ..reports.report import UncertaintyReport
from ..reports.report_tables import COLUMNS
from ..reports.table import NO_VALUE, Cell, Table
from .candidates import Candidate
from .designs import DEEP_ENSEMBLE, HYDRA, ONE_MODEL, SOUP


logger = logging.get_logger(f"transformers.{__name__}")

RECORD, TABLE, REPORT_FOLDER, CIRCUITS = "candidates.json", "candidates.md", "evaluation", "circuits"


@dataclass(frozen=True)
class Hydrated:
    """What `hydrate` found.

    Attributes:
        hydra: the chosen Hydra, calibrated.
        chosen: its candidate.
        table: all candidates, fastest first; also one model, and of several fine-tunings their Deep Ensemble and soup.
        gains: for every other candidate, by name, what its quality is above the chosen one's, with a 95 % interval.
        front: those that no other beats in quality, time and memory at once, fastest first.
        choice: what was chosen and why, in a few sentences.
        alternatives: what the choice would have been without the chosen one, and without that, and so on.
        report: the chosen Hydra ("hydra") and what it is compared with on the judging rows, each calibrated.
        notes: how the data was divided, what was left out and why, and what a time limit cut off.
        folder: where everything lies.
    """

    hydra: PreTrainedModel
    chosen: Candidate
    table: list[Candidate]
    gains: dict[str, Gain]
    front: list[Candidate]
    choice: str
    alternatives: list[Candidate]
    report: UncertaintyReport
    notes: list[str]
    folder: Path

    def __str__(self) -> str:
        return self.choice

    def to_markdown(self) -> str:
        """The choice, the table of candidates, the alternatives and the notes."""
        parts = [
            "# The choice",
            self.choice,
            "## Candidates",
            candidate_table(self.table, self.front, self.chosen, self.gains),
        ]
        parts.append(
            "Costs are relative to one model; time and memory are measured on this machine. Every candidate is calibrated, and judged "
            'on rows that nothing was fitted on. "Above the choice" is the 95 % interval of how many points of quality a candidate '
            "has more than the choice on such rows: where 0 lies in it, these rows can show no difference. ● marks the Pareto front "
            "of quality, time and memory."
        )
        if self.alternatives:
            names = [f"{place}. {each.name}" for place, each in enumerate(self.alternatives, start=1)]
            parts += ["## Next best", "\n".join(names)]
        parts += ["## Notes", "\n".join(f"- {note}" for note in self.notes)]
        return "\n\n".join(parts) + "\n"

    def plot(self, folder: str | os.PathLike) -> list[Path]:
        """Draws quality against measured time and memory into a PNG file in `folder`, and returns its path."""
        return draw_candidates(self.table, self.front, self.chosen, folder)


def candidate_table(
    candidates: Sequence[Candidate], front: Sequence[Candidate], chosen: Candidate, gains: Mapping[str, Gain]
) -> str:
    """One row each, fastest first; the choice in bold, those of the Pareto front marked.

    gains: by name, what the others' quality is above the choice's
    """
    groups = list(candidates[0].auroc)
    titles = ["", "time", "memory", "multiply-adds", "parameters", "quality ↑", "above the choice"]
    titles += [COLUMNS[metric].heading() for metric in ("accuracy", "nll", "ece")]
    titles += [COLUMNS["auroc"].heading("" if group == "OOD" else f"{group}-OOD") for group in groups] + ["front"]
    rows = []
    for each in sorted(candidates, key=lambda each: each.time):
        costs = (each.time, each.memory, each.multiply_adds, each.parameters)
        row = [Cell(each.name, "bold" if each == chosen else ""), *(f"{cost:.2f}" for cost in costs)]
        row += [f"{100 * each.quality:.2f}", _interval(gains.get(each.name))]
        row += [COLUMNS[metric].text(getattr(each, metric)) for metric in ("accuracy", "nll", "ece")]
        row += [COLUMNS["auroc"].text(each.auroc.get(group)) for group in groups]
        rows.append([*row, "●" if each in front else NO_VALUE])
    return Table(titles, rows, "l" + "r" * (len(titles) - 2) + "c").markdown()


def _interval(gain: Gain | None) -> str:
    if gain is None:
        return NO_VALUE
    return f"{100 * gain.change.low:+.1f} to {100 * gain.change.high:+.1f}"


def draw_candidates(
    candidates: Sequence[Candidate], front: Sequence[Candidate], chosen: Candidate, folder: str | os.PathLike
) -> list[Path]:
    """Writes `quality_against_cost.png`, and returns its path."""
    from .._io.pictures import COLOURS, Figure, write_png

    looks = {ONE_MODEL: ("o", 6), DEEP_ENSEMBLE: ("s", 7), SOUP: ("D", 4), HYDRA: ("^", 0)}
    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, cost in zip(panels, ("time", "memory"), strict=True):

        def points(shown: Sequence[Candidate], cost: str = cost) -> tuple[list[float], list[float]]:
            ordered = sorted(shown, key=lambda each: getattr(each, cost))
            return [getattr(each, cost) for each in ordered], [100 * each.quality for each in ordered]

        for kind, (marker, colour) in looks.items():
            found = [each for each in candidates if each.design.kind == kind]
            if found:
                panel.scatter(*points(found), marker=marker, color=COLOURS[colour], label=kind)
        panel.plot(*points(front), color=COLOURS[7], linewidth=0.8, label="Pareto front")
        panel.scatter(*points([chosen]), s=160, facecolors="none", edgecolors=COLOURS[1], label="chosen")
        panel.set_xlabel(f"measured {cost}, one model's being 1")
        panel.grid(color="#DDDDDD", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    measured = chosen.detection is not None
    panels[0].set_ylabel("quality: mean of accuracy and AUROC (%)" if measured else "quality: accuracy (%)")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return [write_png(figure, Path(folder) / "quality_against_cost.png")]


def write_results(
    found: Hydrated,
    folder: Path,
    made_from: str,
    target: str,
    circuits: dict[str, Circuit],
    fine_tunings: bool,
    processor: Any,
    card: dict[str, Any],
) -> None:
    """The Hydra, its processor, circuits, report, plots, table and card.

    made_from: what the search is known by, see `StepsFolder`
    circuits: those of the chosen members, by the names of their files
    fine_tunings: whether members are fine-tunings, and no copies of one model
    """
    found.hydra.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    for name, circuit in circuits.items():
        circuit.save(folder / CIRCUITS / f"{name}.json")
    found.report.to_json(folder / REPORT_FOLDER / "report.json")
    plots = {}
    if importlib.util.find_spec("matplotlib") is None:
        logger.warning("matplotlib is not installed: there will be no plots")
    else:
        found.report.plot(folder / REPORT_FOLDER)
        [path] = found.plot(folder / REPORT_FOLDER)
        plots = {"All candidates": f"{REPORT_FOLDER}/{path.name}"}
    write_atomically(folder / TABLE, found.to_markdown())
    has_results = "dataset" in card
    create_model_card(
        found.hydra,
        found.report if has_results else None,
        circuits=list(circuits.values()) or None,
        fine_tunings=fine_tunings,
        report_model="hydra" if has_results else None,
        plots=plots,
        **card,
    ).save(folder / "README.md")
    record = {
        "made_from": made_from,
        "target": target,
        "chosen": found.chosen.name,
        "choice": found.choice,
        "alternatives": [each.name for each in found.alternatives],
        "front": [each.name for each in found.front],
        "candidates": [each.to_dict() for each in found.table],
        "quality_above_the_choice": {name: asdict(gain.change) for name, gain in found.gains.items()},
        "notes": found.notes,
    }
    write_atomically(folder / RECORD, json.dumps(record, indent=1) + "\n")
