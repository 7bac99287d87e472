"""How many heads can go (B.3): what a model reaches without the first heads of an order, budget by budget."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedModel

from hydra_transformers._io.pictures import COLOURS, MARKERS, NEUTRAL, Figure, finish_panel, legend_below, write_png
from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.heads import Head, as_heads_to_prune, heads_of
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.reports.table import markdown_table

from .outputs import Batches


DENSE = "all heads"
TITLES = {
    "accuracy": "Accuracy (%)",
    "auroc": "AUROC (%)",
    "ece": "ECE",
    "nll": "NLL (nats)",
}
PERCENT = ("accuracy", "auroc")
PICTURE = "budgets.png"


@dataclass(frozen=True)
class SweepPoint:
    """What one pruned network reached.

    order: the name of the order
    budget: how many heads went; kept: how many are left
    accuracy, ece, nll: in distribution; auroc: mean over the OOD sets
    """

    order: str
    budget: int
    kept: int
    accuracy: float
    ece: float
    nll: float
    auroc: float


@dataclass(frozen=True)
class BudgetSweep:
    """dense: the model with all its heads; points: the pruned ones, in the order of their evaluation"""

    dense: SweepPoint
    points: list[SweepPoint]

    @property
    def budgets(self) -> list[int]:
        return sorted({point.budget for point in self.points})

    def values(self, order: str, metric: str) -> dict[int, list[float]]:
        """Budget -> the metric of each draw, from no heads on."""
        found: dict[int, list[float]] = {0: [getattr(self.dense, metric)]}
        for point in self.points:
            if point.order == order:
                found.setdefault(point.budget, []).append(getattr(point, metric))
        return dict(sorted(found.items()))

    def tables(self) -> dict[str, str]:
        """A table for each metric, with a row for each order and a column for each budget."""
        heading = [f"Of {self.dense.kept} heads go", "0", *map(str, self.budgets)]
        tables = {}
        for metric, title in TITLES.items():
            rows = []
            for order in dict.fromkeys(point.order for point in self.points):
                values = self.values(order, metric)
                rows.append([order, *(_cell(metric, values.get(budget)) for budget in (0, *self.budgets))])
            tables[title] = markdown_table(heading, rows)
        return tables

    def plot(self, folder: Path) -> Path:
        """Writes a panel for accuracy, AUROC and ECE: a line for each order, with a band from the lowest to the highest draw."""
        figure = Figure(figsize=(12, 3.7), dpi=150, layout="constrained")
        panels = figure.subplots(1, 3)
        for panel, metric in zip(panels, ("accuracy", "auroc", "ece"), strict=True):
            scale = 100 if metric in PERCENT else 1
            panel.axhline(scale * getattr(self.dense, metric), color=NEUTRAL, linestyle=":", linewidth=1, label=DENSE)
            for number, order in enumerate(dict.fromkeys(point.order for point in self.points)):
                values = self.values(order, metric)
                several = [[scale * value for value in of_budget] for of_budget in values.values()]
                colour = COLOURS[number % len(COLOURS)]
                marker = MARKERS[number % len(MARKERS)]
                means = [math.fsum(draws) / len(draws) for draws in several]
                panel.plot(list(values), means, color=colour, marker=marker, markersize=4, linewidth=1.6, label=order)
                low = map(min, several)
                high = map(max, several)
                panel.fill_between(list(values), list(low), list(high), color=colour, alpha=0.15, linewidth=0)
            panel.set_xlabel(f"Heads that go, of {self.dense.kept}")
            finish_panel(panel, TITLES[metric])
        legend_below(figure, panels[0], 7)
        return write_png(figure, folder / PICTURE)


def _cell(metric: str, values: Sequence[float] | None) -> str:
    """The mean, and with several draws the range."""
    if values is None:
        return "-"
    scale, decimals = (100, 1) if metric in PERCENT else (1, 3)
    mean = f"{scale * math.fsum(values) / len(values):.{decimals}f}"
    if len(values) == 1:
        return mean
    return f"{mean} ({scale * min(values):.{decimals}f} to {scale * max(values):.{decimals}f})"


def sweep_budgets(
    model: PreTrainedModel,
    data: Batches,
    ood_data: Mapping[str, Batches],
    orders: Mapping[str, Sequence[Sequence[Head]]],
    budgets: Sequence[int],
) -> BudgetSweep:
    """Accuracy, calibration and detection of a model without its first heads, for several orders of heads.

    Evaluate on rows that no order was made from: on those that chose the heads, results look too good.

    orders: name -> heads in the order of their removal, once or for several seeds; left out at budgets that they do not rank
    budgets: how many heads go
    """
    hydra = prune_heads(model).eval()
    count = len(heads_of(hydra))

    def point(network: PreTrainedModel, order: str, budget: int) -> SweepPoint:
        report = evaluate_uncertainty({order: network}, data, {"ood": ood_data})
        results = report.models[order]
        return SweepPoint(
            order,
            budget,
            count - budget,
            **{name: results["data"][name] for name in ("accuracy", "ece", "nll")},
            auroc=report.average(order)["auroc"],
        )

    points = []
    for name, draws in orders.items():
        for order in draws:
            for budget in budgets:
                if len(order) >= budget:
                    pruned = prune_heads(hydra, as_heads_to_prune(order[:budget])).eval()
                    points.append(point(pruned, name, budget))
    return BudgetSweep(point(hydra, DENSE, 0), points)
