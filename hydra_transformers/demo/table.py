"""The demo's one table: what each model knows, what it knows it does not know, and what it costs."""

from collections.abc import Mapping

from ..cost import Cost, readable_count
from ..uncertainty import ModelResult, UncertaintyReport


def comparison_table(report: UncertaintyReport, costs: Mapping[str, Cost], batch_size: int) -> str:
    """A markdown table that is also straight in a terminal; arrows say which way is better."""
    rows = [["", "Acc ↑", "ECE ↓", "NLL ↓"]]
    rows[0] += [f"{group} {metric}" for group in ("near", "far") for metric in ("AUROC ↑", "FPR95 ↓")]
    rows[0] += ["parameters", "multiply-adds", f"ms / {batch_size} images"]
    for name, result in report.models.items():
        cost = costs[name]
        counts = [f"{cost.parameters:,}", readable_count(cost.multiply_adds)]
        rows.append([name, *_metrics(result), *counts, f"{cost.milliseconds[batch_size]:.1f}"])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])])
    return "\n".join("| " + " | ".join(_aligned(row, widths)) + " |" for row in rows)


def verdict(report: UncertaintyReport, costs: Mapping[str, Cost]) -> str:
    """The table in a sentence: how often unknown digits pass for known ones, and at what price in multiply-adds."""

    def part(name: str) -> str:
        missed = report.models[name].ood_average("near")["fpr95"]
        return f"{name} {missed:.0%} at {costs[name].multiply_adds / costs['Single'].multiply_adds:.1f}x the work"

    parts = ", ".join(part(name) for name in ("Single", "Hydra", "Deep Ensemble"))
    return f"Known digits refused where 95 % of unknown digits are caught: {parts}."


def _metrics(result: ModelResult) -> list[str]:
    metrics = [f"{result.id['accuracy']:.1%}", f"{result.id['ece']:.3f}", f"{result.id['nll']:.3f}"]
    for group in ("near", "far"):
        average = result.ood_average(group)
        metrics += [f"{average['auroc']:.1%}", f"{average['fpr95']:.1%}"]
    return metrics


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
