"""How many heads can go (B.3): what a model reaches without the first heads of an order, budget by budget."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from hydra_transformers.cost import median_milliseconds
from hydra_transformers.data.batches import batches, split_labels
from hydra_transformers.data.prediction import ZeroShotClassifier, accepted_inputs, check_chooses_one_class, device_of
from hydra_transformers.data.zero_shot import check_class_prompts
from hydra_transformers.pruning import prune_heads
from hydra_transformers.pruning.heads import Head, as_heads_to_prune, check_count, has_two_towers, heads_of
from hydra_transformers.reports import evaluate_uncertainty
from hydra_transformers.reports.table import markdown_table

from .arguments import as_head_set, as_order, check_are_named, foreign_sets


DENSE = "all heads"
TITLES = {
    "accuracy": "Accuracy (%)",
    "auroc": "AUROC (%)",
    "fpr95": "FPR95 (%)",
    "ece": "ECE",
    "nll": "NLL (nats)",
    "time": "Time, that with all heads being 1",
}
HIGHER_IS_BETTER = ("accuracy", "auroc")
PERCENT = ("accuracy", "auroc", "fpr95")

# (pruned model, a name that can be a folder's, such as "circuit-0-12") -> fine-tuned model
FineTune = Callable[[PreTrainedModel, str], PreTrainedModel]


@dataclass(frozen=True)
class SweepPoint:
    """What one pruned network reached.

    order: the name of the order; draw: which of several under that name
    budget: how many heads went; kept: how many are left
    tuned: whether it was fine-tuned after pruning
    accuracy, ece, nll: in distribution; auroc, fpr95: mean over the foreign sets, None without any
    aurocs: by foreign set
    time: of a batch, as a multiple of that with all heads, if it was measured
    """

    order: str
    draw: int
    budget: int
    kept: int
    tuned: bool
    accuracy: float
    ece: float
    nll: float
    auroc: float | None
    fpr95: float | None
    aurocs: dict[str, float]
    time: float | None = None


@dataclass(frozen=True)
class BudgetSweep:
    """The result of `sweep_budgets`.

    dense: the model with all its heads; points: the pruned ones, in the order of their evaluation
    """

    dense: SweepPoint
    points: list[SweepPoint]

    @property
    def orders(self) -> list[str]:
        return list(dict.fromkeys(point.order for point in self.points))

    @property
    def budgets(self) -> list[int]:
        return sorted({point.budget for point in self.points})

    @property
    def metrics(self) -> list[str]:
        return [metric for metric in TITLES if getattr(self.dense, metric) is not None]

    @property
    def stages(self) -> list[bool]:
        """Whether points were tuned: [False], or [False, True]."""
        return sorted({point.tuned for point in self.points})

    def values(self, order: str, metric: str, tuned: bool = False) -> dict[int, list[float]]:
        """Budget -> the metric of each draw."""
        found: dict[int, list[float]] = {}
        for point in self.points:
            if point.order == order and point.tuned == tuned and getattr(point, metric) is not None:
                found.setdefault(point.budget, []).append(getattr(point, metric))
        return dict(sorted(found.items()))

    def largest_budget(
        self, order: str, metric: str = "accuracy", tolerance: float = 0.01, tuned: bool = False
    ) -> int:
        """The largest budget tried before the metric's mean over draws is first more than `tolerance` worse than with all
        heads; 0 if it is at once.

        tuned: of the fine-tuned networks
        """
        if order not in self.orders:
            raise ValueError(f"order is {order!r}: pass one of {', '.join(map(repr, self.orders))}")
        if metric not in self.metrics:
            raise ValueError(f"metric is {metric!r}: pass one of {', '.join(map(repr, self.metrics))}")
        by_budget = self.values(order, metric, tuned)
        if not by_budget:
            stage = "after fine-tuning" if tuned else "before fine-tuning"
            raise ValueError(f"{order!r} has no {metric} {stage}: pass tuned={not tuned}, or another metric")
        sign = 1 if metric in HIGHER_IS_BETTER else -1
        largest, reference = 0, getattr(self.dense, metric)
        for budget, values in by_budget.items():
            if sign * (reference - math.fsum(values) / len(values)) > tolerance:
                break
            largest = budget
        return largest

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        """A table for each metric, with a row for each order and a column for each budget."""
        parts = []
        for metric in self.metrics:
            heading = [f"Of {self.dense.kept} heads go", "0", *map(str, self.budgets)]
            rows = []
            for tuned in self.stages:
                for order in self.orders:
                    values = self.values(order, metric, tuned)
                    if values:
                        values = {0: [getattr(self.dense, metric)]} | values
                        cells = [_cell(metric, values.get(budget)) for budget in (0, *self.budgets)]
                        rows.append([f"{order}, fine-tuned" if tuned else order, *cells])
            parts += [f"### {TITLES[metric]}", markdown_table(heading, rows)]
        return "\n\n".join(parts) + "\n"

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `budgets.png` with accuracy, AUROC, ECE and, if it was measured, time; returns its path."""
        from .head_plots import draw_sweep

        return draw_sweep(self, folder)


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
    data: Any,
    ood_data: Any = None,
    *,
    orders: Mapping[str, Any],
    budgets: Sequence[int],
    finetune: FineTune | None = None,
    score: str = "msp",
    seconds: float = 0.0,
    class_prompts: Mapping[str, Tensor] | None = None,
    batch_size: int = 32,
) -> BudgetSweep:
    """Accuracy, calibration and detection of a model without its first 4, 8, 12, ... heads, for several orders of heads.

    Evaluate on rows that no order was made from: on those that chose the heads, results look too good.

    Args:
        model: an image or text classifier or a CLIP model of Transformers, or a one-member Hydra of one; left as it is.
        data: in-distribution data with labels: a DataLoader, a list of dict batches, or a Dataset or list of dict rows.
        ood_data: foreign data, or several sets as `{name: data}`; without it there are no detection metrics.
        orders: name -> a `Circuit`, scores `{head: score}` (the lowest goes first) such as `taylor_scores` gives, a list of heads
            such as `random_order` gives, or a function from a budget to the heads to cut out (None for no answer). A list of
            several of these, for example of different seeds, becomes one line with a band.
        budgets: how many heads go. An order that ranks fewer is left out there.
        finetune: `(pruned model, name) -> fine-tuned model`; every pruned model is then evaluated before and after.
        score: the OOD score, see `hydra_transformers.uncertainty.ood_score`.
        seconds: about how long to time each pruned model; 0 for not at all.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        batch_size: rows per batch if data comes in rows.
    """
    check_chooses_one_class(model, "model")
    check_are_named(orders, "orders", "order of heads")
    hydra = prune_heads(model).eval()
    heads = heads_of(hydra)
    budgets = checked_budgets(budgets, len(heads))
    check_prompts(hydra, class_prompts)
    plan = [
        (name, draw, budget, chosen)
        for name, given in orders.items()
        for draw, order in enumerate(_draws(given, f"orders[{name!r}]", heads))
        for budget in budgets
        if (chosen := _first_heads(order, budget, f"orders[{name!r}]", heads)) is not None
    ]
    if not plan:
        raise ValueError(f"no order ranks {min(budgets)} heads: pass smaller budgets, or longer orders")
    evaluator = _Evaluator(hydra, data, ood_data, score, seconds, class_prompts, batch_size)
    dense = evaluator.point(hydra, DENSE, 0, 0, len(heads), tuned=False)
    points = []
    for name, draw, budget, chosen in plan:
        place = (name, draw, budget, len(heads) - budget)
        pruned = prune_heads(hydra, as_heads_to_prune(chosen)).eval()
        points.append(evaluator.point(pruned, *place, tuned=False))
        if finetune is not None:
            tuned = finetune(pruned, re.sub(r"[^\w.]+", "-", f"{name}-{draw}-{budget}"))
            if not isinstance(tuned, nn.Module):
                raise TypeError(f"finetune gave a {type(tuned).__name__}: return the fine-tuned model")
            points.append(evaluator.point(tuned.eval(), *place, tuned=True))
    return BudgetSweep(dense, points)


def check_prompts(hydra: PreTrainedModel, class_prompts: Mapping[str, Tensor] | None) -> None:
    """CLIP needs them, other models do not read them."""
    if has_two_towers(hydra):
        check_class_prompts(class_prompts, hydra)
    elif class_prompts is not None:
        raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(hydra).__name__}: leave it out")


def checked_budgets(budgets: Sequence[int], heads: int) -> list[int]:
    """Sorted, each once; a head at least must go, and one must stay."""
    if not isinstance(budgets, Iterable):
        raise TypeError(f"budgets is {budgets!r}: pass how many heads go, such as [4, 8, 12]")
    budgets = list(budgets)
    for budget in budgets:
        check_count(budget, "budgets", 1, heads - 1, f"the model has {heads} heads")
    if not budgets:
        raise ValueError("budgets is empty: pass how many heads go, such as [4, 8, 12]")
    return sorted(set(budgets))


Order = list[Head] | Callable[[int], Any]


def _draws(given: Any, name: str, heads: Sequence[Head]) -> list[Order]:
    """One order, or several."""
    is_several = isinstance(given, (list, tuple)) and given and not isinstance(given[0], tuple)
    return [each if callable(each) else as_order(each, name, heads) for each in (given if is_several else [given])]


def _first_heads(order: Order, budget: int, name: str, heads: Sequence[Head]) -> list[Head] | None:
    """None if the order ranks fewer."""
    if not callable(order):
        return order[:budget] if len(order) >= budget else None
    given = order(budget)
    if given is None:
        return None
    chosen = as_head_set(given, f"{name}({budget})", heads)
    if len(chosen) != budget:
        raise ValueError(f"{name}({budget}) gives {len(chosen)} heads: give as many as the budget says")
    return chosen


class _Evaluator:
    """Evaluates networks on data that is read once."""

    def __init__(
        self,
        whole: PreTrainedModel,
        data: Any,
        ood_data: Any,
        score: str,
        seconds: float,
        class_prompts: Mapping[str, Tensor] | None,
        batch_size: int,
    ):
        device = device_of(whole)
        sets = {} if ood_data is None else foreign_sets(ood_data)
        self.data = list(batches(data, batch_size, device))
        self.ood = {name: list(batches(each, batch_size, device)) for name, each in sets.items()}
        self.score, self.seconds, self.class_prompts = score, seconds, class_prompts
        self.whole = self._classifier(whole)

    def point(
        self, network: PreTrainedModel, order: str, draw: int, budget: int, kept: int, tuned: bool
    ) -> SweepPoint:
        model = self._classifier(network)
        ood = {"ood": self.ood} if self.ood else None
        report = evaluate_uncertainty({order: model}, self.data, ood, score=self.score)
        results = report.models[order]
        detection = report.average(order) if self.ood else {}
        return SweepPoint(
            order,
            draw,
            budget,
            kept,
            tuned,
            **{name: results["data"][name] for name in ("accuracy", "ece", "nll")},
            **{name: detection.get(name) for name in ("auroc", "fpr95")},
            aurocs={name: results[f"{name} (ood)"]["auroc"] for name in self.ood},
            time=self._time(model, budget) if self.seconds and not tuned else None,
        )

    def _classifier(self, network: PreTrainedModel) -> nn.Module:
        return network if self.class_prompts is None else ZeroShotClassifier(network, self.class_prompts)

    def _time(self, model: nn.Module, budget: int) -> float:
        """Relative to all heads; both run in turns, so that whatever slows the machine slows both."""
        if budget == 0:
            return 1.0
        inputs = accepted_inputs(model, split_labels(self.data[0])[0])
        found = median_milliseconds({"whole": self.whole, "model": model}, inputs, self.seconds)
        return found["model"] / found["whole"]
