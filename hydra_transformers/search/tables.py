"""Candidates as a markdown table."""

from collections.abc import Sequence

from ..reports.table import NO_VALUE, Cell, Table
from ..reports.tables import COLUMNS
from .candidates import Candidate


def candidate_table(candidates: Sequence[Candidate], front: Sequence[Candidate], chosen: Candidate) -> str:
    """One row each, fastest first; the choice in bold, those of the Pareto front marked."""
    groups = list(candidates[0].auroc)
    titles = ["", "time", "memory", "multiply-adds", "parameters", "quality ↑"]
    titles += [COLUMNS[metric].heading() for metric in ("accuracy", "nll", "ece")]
    titles += [COLUMNS["auroc"].heading("" if group == "OOD" else f"{group}-OOD") for group in groups] + ["front"]
    rows = []
    for each in sorted(candidates, key=lambda each: each.time):
        costs = (each.time, each.memory, each.multiply_adds, each.parameters)
        row = [Cell(each.name, "bold" if each == chosen else ""), *(f"{cost:.2f}" for cost in costs)]
        row.append(f"{100 * each.quality:.2f}")
        row += [COLUMNS[metric].text(getattr(each, metric)) for metric in ("accuracy", "nll", "ece")]
        row += [COLUMNS["auroc"].text(each.auroc.get(group)) for group in groups]
        rows.append([*row, "●" if each in front else NO_VALUE])
    return Table(titles, rows, "l" + "r" * (len(titles) - 2) + "c").markdown()
