"""The demo's one table and its sentences: what each model knows, what it knows it does not know, and what it costs."""

from collections.abc import Mapping

from ..cost import Cost, readable_count
from ..reports.gains import gain_sentence
from ..reports.report import ModelResult, UncertaintyReport
from ..reports.table import Table


GROUPS = ("near", "far")


def comparison_table(report: UncertaintyReport, costs: Mapping[str, Cost], batch_size: int) -> Table:
    """A row for each model; arrows say which way is better."""
    titles = ["", "Acc ↑", "ECE ↓", "NLL ↓"]
    titles += [f"{group} {metric}" for group in GROUPS for metric in ("AUROC ↑", "FPR95 ↓")]
    titles += ["parameters", "multiply-adds", f"ms / {batch_size} images"]
    rows = []
    for name, result in report.models.items():
        cost = costs[name]
        counts = [f"{cost.parameters:,}", readable_count(cost.multiply_adds)]
        rows.append([name, *_metrics(result), *counts, f"{cost.milliseconds[batch_size]:.1f}"])
    return Table(titles, rows)


def comparison(report: UncertaintyReport, costs: Mapping[str, Cost], name: str, other: str, batch_size: int) -> str:
    """What one model gains and loses against another, as far as these rows can show it, and its price."""
    mine, theirs = costs[name], costs[other]
    time = mine.milliseconds[batch_size] / theirs.milliseconds[batch_size]
    counts = (mine.parameters / theirs.parameters, mine.multiply_adds / theirs.multiply_adds)
    speed = f"{1 / time:.1f} times as fast" if time < 0.95 else f"{time:.2f} times the time"
    price = f"{speed}, {counts[0]:.2f} times the parameters, {counts[1]:.2f} times the multiply-adds"
    return f"{gain_sentence(name, other, report.gains(name, other))} Price: {price}."


def _metrics(result: ModelResult) -> list[str]:
    metrics = [f"{result.id['accuracy']:.1%}", f"{result.id['ece']:.3f}", f"{result.id['nll']:.3f}"]
    for group in GROUPS:
        average = result.ood_average(group)
        metrics += [f"{average['auroc']:.1%}", f"{average['fpr95']:.1%}"]
    return metrics
