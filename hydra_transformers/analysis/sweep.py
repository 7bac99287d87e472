"""How many heads can go (B.3): what a model reaches without the first heads of an order, budget by budget."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..cost import median_milliseconds
from ..data.batches import batches, split_labels
from ..data.prediction import (
    ZeroShotClassifier,
    accepted_inputs,
    check_chooses_one_class,
    check_class_prompts,
    device_of,
)
from ..pruning import prune_heads
from ..pruning.heads import Head, as_heads_to_prune, check_count, has_two_towers, heads_of
from ..reports.evaluation import evaluate_uncertainty
from ..reports.table import Table
from .foreign_sets import foreign_sets
from .head_sets import as_head_set, as_order, check_are_named


DENSE = "all heads"
METRICS = ("accuracy", "auroc", "fpr95", "ece", "nll", "time")
HIGHER_IS_BETTER = {"accuracy": True, "auroc": True, "fpr95": False, "ece": False, "nll": False, "time": False}
TITLES = {
    "accuracy": "Accuracy (%)",
    "auroc": "AUROC (%)",
    "fpr95": "FPR95 (%)",
    "ece": "ECE",
    "nll": "NLL (nats)",
    "time": "Time, that with all heads being 1",
}
PERCENT = ("accuracy", "auroc", "fpr95")

# A pruned model, and a name for it that can be a folder's ("circuit-0-12"), to what it is after training.
FineTune = Callable[[PreTrainedModel, str], PreTrainedModel]


@dataclass(frozen=True)
class SweepPoint:
    """What one pruned network reached.

    order: the name of the order; draw: which of several under that name
    budget: how many heads went; kept: how many are left
    tuned: whether it was fine-tuned after pruning
    accuracy, ece, nll: in distribution; auroc, fpr95: mean over the foreign sets, None without any
    aurocs: by foreign set
    time: of a batch, as a multiple of that with all heads, where it was measured
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
    """What `sweep_budgets` found.

    dense: of the model with all its heads; points: of all others, in the order in which they were judged
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
        return [metric for metric in METRICS if getattr(self.dense, metric) is not None]

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
        """The most heads that can go, of the budgets that were tried, before the metric (a mean over draws) is first more than
        `tolerance` worse than that of all heads; 0 where the first is already.

        tuned: of the fine-tuned networks, where there are any
        """
        if order not in self.orders:
            raise ValueError(f"order is {order!r}: pass one of {', '.join(map(repr, self.orders))}")
        if metric not in self.metrics:
            raise ValueError(f"metric is {metric!r}: pass one of {', '.join(map(repr, self.metrics))}")
        by_budget = self.values(order, metric, tuned)
        if not by_budget:
            stage = "after fine-tuning" if tuned else "before fine-tuning"
            raise ValueError(f"{order!r} has no {metric} {stage}: pass tuned={not tuned}, or another metric")
        sign = 1 if HIGHER_IS_BETTER[metric] else -1
        largest, reference = 0, getattr(self.dense, metric)
        for budget, values in by_budget.items():
            if sign * (reference - math.fsum(values) / len(values)) > tolerance:
                break
            largest = budget
        return largest

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_markdown(self) -> str:
        """A table for each metric: an order in each row, a budget in each column."""
        heads = self.dense.kept
        parts = []
        for metric in self.metrics:
            heading = [f"Of {heads} heads go", "0", *map(str, self.budgets)]
            rows = []
            for tuned in self.stages:
                for order in self.orders:
                    values = self.values(order, metric, tuned)
                    if not values:
                        continue
                    title = f"{order}, fine-tuned" if tuned else order
                    cells = [_cell(metric, values[budget]) if budget in values else "-" for budget in self.budgets]
                    rows.append([title, _cell(metric, [getattr(self.dense, metric)]), *cells])
            parts += [f"### {TITLES[metric]}", Table(heading, rows).markdown()]
        return "\n\n".join(parts) + "\n"

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `budgets.png`, a panel for each of accuracy, AUROC, ECE and where it was measured time; returns its path."""
        from .plots import draw_sweep

        return draw_sweep(self, folder)


def _cell(metric: str, values: Sequence[float]) -> str:
    """The mean, and with several draws how far they reach."""
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

    Judge on rows that no order was made from: those that chose the heads flatter it.

    Args:
        model: an image or text classifier or a CLIP model of Transformers, or a one-member Hydra of one; left as it is.
        data: in-distribution data with labels: a DataLoader, a list of dict batches, or a Dataset or list of dict rows.
        ood_data: foreign data, or several sets as `{name: data}`; without it nothing is said of detection.
        orders: name -> a `Circuit`, scores `{head: score}` (the lowest goes first) such as `taylor_scores` gives, a list of heads
            such as `random_order` gives, or a function from a budget to the heads to cut out (None where it has no answer). Or
            a list of several of these, of different seeds for example, which are then shown as one line with a band.
        budgets: how many heads go. An order that ranks fewer is left out there.
        finetune: `(pruned model, name) -> fine-tuned model`; every pruned model is then judged before and after.
        score: the OOD score, see `hydra_transformers.uncertainty.ood_score`.
        seconds: about how long to measure the time of each pruned model; 0 for not at all.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        batch_size: rows per batch where data comes in rows.
    """
    check_chooses_one_class(model, "model")
    check_are_named(orders, "orders", "order of heads")
    hydra = prune_heads(model).eval()
    heads = heads_of(hydra)
    budgets = checked_budgets(budgets, len(heads))
    check_prompts(hydra, class_prompts)
    plan = [
        Pruning(name, place, budget, chosen)
        for name, given in orders.items()
        for place, order in enumerate(_several(given, f"orders[{name!r}]", heads))
        for budget in budgets
        if (chosen := _heads_that_go(order, budget, f"orders[{name!r}]", heads)) is not None
    ]
    if not plan:
        raise ValueError(f"no order ranks {min(budgets)} heads: pass smaller budgets, or longer orders")
    evaluator = _Evaluator(hydra, data, ood_data, score, seconds, class_prompts, batch_size)
    dense = evaluator.point(hydra, Pruning(DENSE, 0, 0, []), len(heads), tuned=False)
    points = []
    for pruning in plan:
        kept = len(heads) - pruning.budget
        pruned = prune_heads(hydra, as_heads_to_prune(pruning.heads)).eval()
        points.append(evaluator.point(pruned, pruning, kept, tuned=False))
        if finetune is not None:
            tuned = finetune(pruned, pruning.folder_name)
            if not isinstance(tuned, nn.Module):
                raise TypeError(f"finetune gave a {type(tuned).__name__}: return the fine-tuned model")
            points.append(evaluator.point(tuned.eval(), pruning, kept, tuned=True))
    return BudgetSweep(dense, points)


def check_prompts(hydra: PreTrainedModel, class_prompts: Mapping[str, Tensor] | None) -> None:
    """Refuses to go without them where classes are known by nothing else, and with them where they are not read."""
    if has_two_towers(hydra):
        check_class_prompts(class_prompts, hydra)
    elif class_prompts is not None:
        raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(hydra).__name__}: leave it out")


def checked_budgets(budgets: Sequence[int], heads: int) -> list[int]:
    """In order, each once; refuses what leaves no head, or takes none."""
    if not isinstance(budgets, Iterable):
        raise TypeError(f"budgets is {budgets!r}: pass how many heads go, such as [4, 8, 12]")
    budgets = list(budgets)
    for budget in budgets:
        check_count(budget, "budgets", 1, heads - 1, f"the model has {heads} heads")
    if not budgets:
        raise ValueError("budgets is empty: pass how many heads go, such as [4, 8, 12]")
    return sorted(set(budgets))


@dataclass(frozen=True)
class Pruning:
    """The heads that one order gives for one budget."""

    order: str
    draw: int
    budget: int
    heads: list[Head]

    @property
    def folder_name(self) -> str:
        return re.sub(r"[^\w.]+", "-", f"{self.order}-{self.draw}-{self.budget}")


Order = list[Head] | Callable[[int], Any]


def _several(given: Any, name: str, heads: Sequence[Head]) -> list[Order]:
    """One order, or several."""
    is_several = isinstance(given, (list, tuple)) and given and not isinstance(given[0], tuple)
    return [each if callable(each) else as_order(each, name, heads) for each in (given if is_several else [given])]


def _heads_that_go(order: Order, budget: int, name: str, heads: Sequence[Head]) -> list[Head] | None:
    """None where the order ranks fewer."""
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
    """The data, read once, and everything else that all networks are judged by."""

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

    def point(self, network: PreTrainedModel, pruning: Pruning, kept: int, tuned: bool) -> SweepPoint:
        model = self._classifier(network)
        ood = {"ood": self.ood} if self.ood else None
        [result] = evaluate_uncertainty({pruning.order: model}, self.data, ood, score=self.score).models.values()
        detection = result.ood_average() if self.ood else {}
        return SweepPoint(
            order=pruning.order,
            draw=pruning.draw,
            budget=pruning.budget,
            kept=kept,
            tuned=tuned,
            **{name: result.id[name] for name in ("accuracy", "ece", "nll")},
            **{name: detection.get(name) for name in ("auroc", "fpr95")},
            aurocs={name: of["auroc"] for name, of in result.ood["ood"].items()} if self.ood else {},
            time=self._time(model, pruning) if self.seconds and not tuned else None,
        )

    def _classifier(self, network: PreTrainedModel) -> nn.Module:
        return network if self.class_prompts is None else ZeroShotClassifier(network, self.class_prompts)

    def _time(self, model: nn.Module, pruning: Pruning) -> float:
        """Both run in turns, so that whatever slows the machine slows both."""
        if pruning.budget == 0:
            return 1.0
        inputs = accepted_inputs(model, split_labels(self.data[0])[0])
        found = median_milliseconds({"whole": self.whole, "model": model}, inputs, self.seconds)
        return found["model"] / found["whole"]
