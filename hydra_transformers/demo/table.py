"""The demo's one table: what each model knows, what it knows it does not know, and what it costs."""

from collections.abc import Mapping

from ..cost import Cost, readable_count
from ..reports import ModelResult, UncertaintyReport, gain_sentence


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


def verdict(report: UncertaintyReport, costs: Mapping[str, Cost], name: str, other: str, batch_size: int) -> str:
    """The table in two sentences: what one model gains and loses against another, where these rows can show it, and its
    price."""
    judged = gain_sentence(name, other, report.gains(name, other))
    mine, theirs = costs[name], costs[other]
    time = mine.milliseconds[batch_size] / theirs.milliseconds[batch_size]
    speed = f" {1 / time:.1f} times as fast." if time < 0.95 else ""
    prices = (
        f"{time:.2f} times the time",
        f"{mine.parameters / theirs.parameters:.2f} times the parameters",
        f"{mine.multiply_adds / theirs.multiply_adds:.2f} times the multiply-adds",
    )
    return f"{judged}{speed} Price: {', '.join(prices)}."


def _metrics(result: ModelResult) -> list[str]:
    metrics = [f"{result.id['accuracy']:.1%}", f"{result.id['ece']:.3f}", f"{result.id['nll']:.3f}"]
    for group in ("near", "far"):
        average = result.ood_average(group)
        metrics += [f"{average['auroc']:.1%}", f"{average['fpr95']:.1%}"]
    return metrics


def _aligned(row: list[str], widths: list[int]) -> list[str]:
    return [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
