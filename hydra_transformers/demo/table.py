"""The demo's one table and its sentences: what each model knows, what it knows it does not know, and what it costs."""

from collections.abc import Mapping

from ..cost import Cost, readable_count
from ..reports.gains import gain_sentence
from ..reports.report import UncertaintyReport
from ..reports.table import Table


GROUPS = ("near", "far")


def comparison_table(report: UncertaintyReport, costs: Mapping[str, Cost], batch_size: int) -> Table:
    """A row for each model; arrows say which way is better."""
    titles = ["", "accuracy ↑", "NLL ↓", *(f"{group} AUROC ↑" for group in GROUPS)]
    titles += ["parameters", "multiply-adds", f"ms / {batch_size} images"]
    rows = []
    for name, result in report.models.items():
        cost = costs[name]
        metrics = [f"{result.id['accuracy']:.1%}", f"{result.id['nll']:.3f}"]
        metrics += [f"{result.ood_average(group)['auroc']:.1%}" for group in GROUPS]
        counts = [f"{cost.parameters:,}", readable_count(cost.multiply_adds)]
        rows.append([name, *metrics, *counts, f"{cost.milliseconds[batch_size]:.1f}"])
    return Table(titles, rows)


def comparison(report: UncertaintyReport, costs: Mapping[str, Cost], name: str, other: str, batch_size: int) -> str:
    """What one model gains and loses against another, as far as these rows can show it, and its price."""
    mine, theirs = costs[name], costs[other]
    time = mine.milliseconds[batch_size] / theirs.milliseconds[batch_size]
    counts = (mine.parameters / theirs.parameters, mine.multiply_adds / theirs.multiply_adds)
    speed = f"{1 / time:.1f} times as fast" if time < 0.95 else f"{time:.2f} times the time"
    price = f"{speed}, {counts[0]:.2f} times the parameters, {counts[1]:.2f} times the multiply-adds"
    return f"{gain_sentence(name, other, report.gains(name, other))} Price: {price}."
