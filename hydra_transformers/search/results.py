"""The result of `hydrate`: the chosen Hydra, all candidates as a table and a plot, and the folder with all of it."""

import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from .._io.files import write_atomically
from ..hub.card import create_model_card
from ..pruning import Circuit
from ..reports.gains import Gain
from ..reports.report import UncertaintyReport
from ..reports.report_tables import COLUMNS, group_title
from ..reports.table import NO_VALUE, Cell, Table
from ..reports.task_report import TaskReport
from .candidates import DEEP_ENSEMBLE, HYDRA, ONE_MODEL, SOUP, Candidate


if TYPE_CHECKING:
    from ..models.auto import HydraModel


logger = logging.get_logger(f"transformers.{__name__}")

RECORD, TABLE, REPORT_FOLDER, CIRCUITS = "candidates.json", "candidates.md", "evaluation", "circuits"
EXPLAINED = (
    "Costs are relative to one model; time and memory are measured on this machine. Every candidate is calibrated, and evaluated "
    'on rows that nothing was fitted on. "Above the choice" is the 95 % interval of how many points of quality a candidate '
    "has more than the choice on such rows: where 0 lies in it, these rows can show no difference. ● marks the Pareto front "
    "of quality, time and memory."
)


@dataclass(frozen=True)
class Hydrated:
    """The result of `hydrate`.

    Attributes:
        hydra: the chosen Hydra, calibrated.
        chosen: its candidate.
        table: all candidates, fastest first; also one model, and for several fine-tunings their Deep Ensemble and soup.
        gains: name of every other candidate -> its gain in quality over the chosen one, with a 95 % interval.
        front: those that no other beats in quality, time and memory at once, fastest first.
        choice: the choice and its reasons in a few sentences.
        alternatives: the choices that would follow if each choice before was left out.
        report: (a `TaskReport` of other tasks than one class per row) the chosen Hydra ("hydra") and the models it is compared with on the evaluation rows, each calibrated.
        notes: how the data was divided, what was left out and why, and what a time limit cut off.
        folder: where everything is.
    """

    hydra: "HydraModel"
    chosen: Candidate
    table: list[Candidate]
    gains: dict[str, Gain]
    front: list[Candidate]
    choice: str
    alternatives: list[Candidate]
    report: UncertaintyReport | TaskReport
    notes: list[str]
    folder: Path

    def __str__(self) -> str:
        return self.choice

    def to_markdown(self) -> str:
        """The choice, the table of candidates, the alternatives and the notes."""
        table = candidate_table(self.table, self.front, self.chosen, self.gains)
        parts = ["# The choice", self.choice, "## Candidates", table, EXPLAINED]
        if self.alternatives:
            names = [f"{place}. {each.name}" for place, each in enumerate(self.alternatives, start=1)]
            parts += ["## Next best", "\n".join(names)]
        parts += ["## Notes", "\n".join(f"- {note}" for note in self.notes)]
        return "\n\n".join(parts) + "\n"

    def plot(self, folder: str | os.PathLike) -> list[Path]:
        """Draws quality against measured time and memory into a PNG file in `folder`, and returns its path."""
        from .._io.pictures import COLOURS, Figure, finish_panel, legend_below, write_png

        looks = {ONE_MODEL: ("o", 6), DEEP_ENSEMBLE: ("s", 7), SOUP: ("D", 4), HYDRA: ("^", 0)}
        figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained")
        panels = figure.subplots(1, 2, sharey=True)
        for panel, cost in zip(panels, ("time", "memory"), strict=True):

            def points(shown: Sequence[Candidate], cost: str = cost) -> tuple[list[float], list[float]]:
                ordered = sorted(shown, key=lambda each: getattr(each, cost))
                return [getattr(each, cost) for each in ordered], [100 * each.quality for each in ordered]

            for kind, (marker, colour) in looks.items():
                found = [each for each in self.table if each.design.kind == kind]
                if found:
                    panel.scatter(*points(found), marker=marker, color=COLOURS[colour], label=kind)
            panel.plot(*points(self.front), color=COLOURS[7], linewidth=0.8, label="Pareto front")
            panel.scatter(*points([self.chosen]), s=160, facecolors="none", edgecolors=COLOURS[1], label="chosen")
            panel.set_xlabel(f"measured {cost}, one model's being 1")
            finish_panel(panel, "")
        is_measured = self.chosen.detection is not None
        measure = self.chosen.measure
        panels[0].set_ylabel(f"quality: mean of {measure} and AUROC (%)" if is_measured else f"quality: {measure} (%)")
        legend_below(figure, panels[0], len(panels[0].get_legend_handles_labels()[1]))
        return [write_png(figure, Path(folder) / "quality_against_cost.png")]


def candidate_table(
    candidates: Sequence[Candidate], front: Sequence[Candidate], chosen: Candidate, gains: Mapping[str, Gain]
) -> str:
    """One row each, fastest first; the choice in bold, the Pareto front marked.

    gains: name of every other candidate -> its gain in quality over the choice
    """
    groups, measure = list(candidates[0].auroc), candidates[0].measure
    metrics = [name for name in ("accuracy", "nll", "ece") if getattr(candidates[0], name) is not None]
    titles = ["", "time", "memory", "multiply-adds", "parameters", "quality ↑", "above the choice"]
    titles += [
        COLUMNS[each].heading() if each != "accuracy" or measure == each else f"{measure} ↑" for each in metrics
    ]
    titles += [COLUMNS["auroc"].heading("" if group == "OOD" else group_title(group)) for group in groups] + ["front"]
    rows = []
    for each in sorted(candidates, key=lambda each: each.time):
        costs = (each.time, each.memory, each.multiply_adds, each.parameters)
        gain = gains.get(each.name)
        above = NO_VALUE if gain is None else f"{100 * gain.change.low:+.1f} to {100 * gain.change.high:+.1f}"
        row = [Cell(each.name, "bold" if each == chosen else ""), *(f"{cost:.2f}" for cost in costs)]
        row += [f"{100 * each.quality:.2f}", above, *(COLUMNS[name].text(getattr(each, name)) for name in metrics)]
        row += [COLUMNS["auroc"].text(each.auroc.get(group)) for group in groups]
        rows.append([*row, "●" if each in front else NO_VALUE])
    return Table(titles, rows, "l" + "r" * (len(titles) - 2) + "c").markdown()


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
    """Writes the Hydra, its processor, circuits, report, plots, table and card.

    made_from: the digest of the `StepsFolder`
    circuits: name of the file -> circuit of a chosen member
    fine_tunings: whether members are fine-tunings, not copies of one model
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
        if isinstance(found.report, UncertaintyReport):
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
