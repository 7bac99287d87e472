"""All analyses of one model in one call, saved as a folder with a report, results and plots."""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hydra_transformers._io.files import write_atomically
from hydra_transformers.data.batches import batches, split_labels
from hydra_transformers.data.evaluation_data import check_label_range
from hydra_transformers.pruning import (
    Circuit,
    TaylorPruning,
    extract_circuit,
    prune_heads,
    taylor_prune,
    taylor_scores,
)
from hydra_transformers.pruning.heads import Head, as_heads, check_count, has_two_towers, heads_of

from .arguments import as_head_sets, foreign_sets, random_order
from .comparison import HeadSetComparison, compare_head_sets
from .head_scores import HeadScores
from .noise import with_noise
from .proposition import PruningUnderNoise, pruning_under_noise
from .separation import HeadSeparation, check_are_enough_rows, head_dim_of, head_separation
from .sweep import BudgetSweep, FineTune, check_prompts, checked_budgets, sweep_budgets


CIRCUITS = {"acc": "CircAcc", "ood": "CircOOD", "avg": "CircAvg"}
TAYLOR_BY_LAYER, TAYLOR, RANDOM = "Taylor, by layer", "Taylor", "random"
REPORT, RESULTS = "report.md", "results.json"
TITLES = {
    "sweep": "How many can go",
    "comparison": "Who is pruned",
    "separation": "What heads see",
    "proposition": "Is pruning worse under noise? (Proposition 1)",
    "scores": "Taylor scores",
}


@dataclass(frozen=True)
class HeadReport:
    """The result of `analyse_heads`: one result for each question, each with `to_markdown()` and `plot(folder)`.

    circuits: objective -> the extracted circuit
    budget: how many heads the compared sets cut out
    """

    budget: int
    circuits: dict[str, Circuit]
    proposition: PruningUnderNoise
    separation: HeadSeparation
    comparison: HeadSetComparison
    sweep: BudgetSweep
    scores: HeadScores
    notes: list[str] = field(default_factory=list)

    def to_markdown(self, pictures: Mapping[str, Sequence[Path]] | None = None) -> str:
        """A page with a part for each question.

        pictures: title of a part -> the pictures to show below it, as paths beside the report
        """
        parts = ["# Heads", *self.notes]
        for name, title in TITLES.items():
            parts += [f"## {title}", *(f"![]({path})" for path in (pictures or {}).get(title, []))]
            parts.append(getattr(self, name).to_markdown().rstrip())
        return "\n\n".join(parts) + "\n"

    def tables(self) -> dict[str, str]:
        """Every table by part and title, such as "sweep/Accuracy (%)"."""
        found = {}
        for name in TITLES:
            for part in f"\n{getattr(self, name).to_markdown()}".split("\n### ")[1:]:
                title, _, table = part.partition("\n")
                found[f"{name}/{title}"] = table.strip()
        return found

    def to_dict(self) -> dict[str, Any]:
        """All results but the circuits."""
        return {"budget": self.budget, **{name: getattr(self, name).to_dict() for name in TITLES}}

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `report.md`, `results.json`, `circuits/` and, if matplotlib is installed, plots; returns the report's path."""
        folder = Path(folder)
        for objective, circuit in self.circuits.items():
            circuit.save(folder / "circuits" / f"{objective}.json")
        try:
            pictures = {
                title: [path.relative_to(folder) for path in getattr(self, name).plot(folder)]
                for name, title in TITLES.items()
            }
        except ImportError:
            pictures = {}
        write_atomically(folder / RESULTS, json.dumps(self.to_dict(), indent=1) + "\n")
        return write_atomically(folder / REPORT, self.to_markdown(pictures))


def in_dtype(model: PreTrainedModel, dtype: torch.dtype | None) -> PreTrainedModel:
    """The model as a Hydra of one member in another dtype; the model itself for None."""
    return model if dtype is None else prune_heads(model).to(dtype)


def analyse_heads(
    model: PreTrainedModel,
    choosing_data: Any,
    choosing_ood_data: Any,
    data: Any,
    ood_data: Any,
    *,
    noisy_data: Any = None,
    budget: int | None = None,
    budgets: Sequence[int] | None = None,
    other_head_sets: Mapping[str, Any] | None = None,
    finetune: FineTune | None = None,
    seconds: float = 0.0,
    random_orders: int = 3,
    noise_rows: int = 500,
    class_prompts: Mapping[str, Tensor] | None = None,
    batch_size: int = 32,
    circuit_options: Mapping[str, Any] | None = None,
    circuit_dtype: torch.dtype | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> HeadReport:
    """What heads see, which are pruned, how many can go, and whether pruning is worse under noise.

    Taylor scores and circuits (for accuracy, detection and both) choose heads on `choosing_data` and `choosing_ood_data`;
    everything is evaluated on `data` and `ood_data`, which must be other rows.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one; left as it is.
        choosing_data, choosing_ood_data: known data with labels, and foreign data, to choose heads on.
        data, ood_data: known data with labels, and foreign data (one set, or several as `{name: data}`), to evaluate on.
        noisy_data: with labels; by default `data` through `with_noise`.
        budget: how many heads the compared sets cut out; by default a quarter.
        budgets: those of the sweep; by default eight up to half of the heads.
        other_head_sets: name -> heads to compare as well, for example those of another fine-tuning.
        finetune, seconds: see `sweep_budgets`.
        random_orders: how many random orders the sweep has for comparison.
        noise_rows: how many rows to study noise on: second derivatives take as long as dozens of forwards.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        batch_size: rows per batch if data comes in rows.
        circuit_options: further options of `extract_circuit`, such as `{"mode": "shortlist"}`.
        circuit_dtype: in which circuits are extracted; by default the model's.
        tell: called with the name of each step when it begins.
    """
    hydra = prune_heads(model)
    heads = heads_of(hydra)
    budget = max(1, len(heads) // 4) if budget is None else budget
    check_count(noise_rows, "noise_rows", 1, 10**9, "noise is studied on rows")
    check_count(budget, "budget", 1, len(heads) - 1, f"the model has {len(heads)} heads")
    check_count(random_orders, "random_orders", 0, 10**6, "each is evaluated at every budget")
    if budgets is None:
        budgets = sorted({max(1, len(heads) * part // 16) for part in range(1, 9)})
    budgets = checked_budgets(budgets, len(heads))
    others = _other_head_sets(other_head_sets, heads)
    check_prompts(hydra, class_prompts)
    prompts = {} if class_prompts is None else {"class_prompts": class_prompts}
    choosing_data, choosing_ood_data, data = (
        list(batches(each, batch_size)) for each in (choosing_data, choosing_ood_data, data)
    )
    ood_data = {name: list(batches(each, batch_size)) for name, each in foreign_sets(ood_data).items()}
    noisy_data = None if noisy_data is None else list(batches(noisy_data, batch_size))
    # Refuse at once what later steps would refuse: extracting circuits of a large model takes hours.
    check_are_enough_rows(head_dim_of(hydra), _rows(data), {name: _rows(each) for name, each in ood_data.items()})
    classes = hydra.config.num_labels if class_prompts is None else len(class_prompts["input_ids"])
    for name, each in {"data": data, "noisy_data": noisy_data or []}.items():
        _check_labels(each, name, classes)

    tell("Taylor scores")
    towers = {"towers": ("vision", "text")} if has_two_towers(hydra) else {}
    scores = taylor_scores(model, choosing_data, **prompts, **towers)
    orders = {TAYLOR_BY_LAYER: TaylorByLayer(model, choosing_data, prompts), TAYLOR: _of_data_tower(scores)}
    circuits = {}
    for objective, name in CIRCUITS.items():
        tell(f"circuit for {objective!r}")
        options = {"budget": max(budget, *budgets), **prompts}
        options |= circuit_options or {}
        circuits[objective] = orders[name] = extract_circuit(
            in_dtype(model, circuit_dtype), choosing_data, choosing_ood_data, objective, **options
        )
    orders[RANDOM] = [random_order(model, seed) for seed in range(random_orders)]

    tell("what each budget leaves")
    options = {"finetune": finetune, "seconds": seconds, "batch_size": batch_size, **prompts}
    sweep = sweep_budgets(model, data, ood_data, orders=orders, budgets=budgets, **options)
    tell("what heads see")
    detecting = circuits["ood"]
    pruned = {CIRCUITS["ood"]: detecting.first(budget)}
    separation = head_separation(model, data, ood_data, pruned=pruned, ranking=detecting, batch_size=batch_size)
    sets = {
        TAYLOR_BY_LAYER: orders[TAYLOR_BY_LAYER](budget),
        TAYLOR: sorted(orders[TAYLOR], key=orders[TAYLOR].__getitem__)[:budget],
        **{name: circuits[objective].first(budget) for objective, name in CIRCUITS.items()},
        RANDOM: orders[RANDOM][0][:budget] if random_orders else None,
    }
    sets = {name: each for name, each in sets.items() if each is not None}
    comparison = compare_head_sets(model, {**sets, **others})
    tell("whether pruning is worse under noise")
    clean = _some_rows(data, noise_rows)
    noisy = with_noise(clean) if noisy_data is None else _some_rows(noisy_data, noise_rows)
    proposition = pruning_under_noise(model, clean, noisy, sets, **prompts)
    return HeadReport(budget, circuits, proposition, separation, comparison, sweep, HeadScores(scores))


def _some_rows(data: Sequence[Mapping[str, Tensor]], rows: int) -> list[dict[str, Tensor]]:
    """About `rows` rows, evenly spread over all batches."""
    step = max(1, round(_rows(data) / rows))
    return [{name: value[::step] for name, value in batch.items()} for batch in data]


def _rows(data: Sequence[Mapping[str, Tensor]]) -> int:
    return sum(len(next(iter(batch.values()))) for batch in data)


def _check_labels(data: Sequence[Mapping[str, Tensor]], name: str, classes: int) -> None:
    for batch in data:
        labels = split_labels(batch)[1]
        if labels is None:
            raise ValueError(f"{name} has no labels: give every batch its class indices as 'labels'")
        check_label_range(labels, name, classes)


def _other_head_sets(given: Mapping[str, Any] | None, heads: Sequence[Head]) -> dict[str, list[Head]]:
    sets = as_head_sets(given, "other_head_sets", heads) if given else {}
    for name in {TAYLOR_BY_LAYER, TAYLOR, *CIRCUITS.values(), RANDOM} & set(sets):
        raise ValueError(f"other_head_sets has a set named {name!r}, which is made here: choose another name")
    return sets


def _of_data_tower(scores: Mapping[Head, float]) -> dict[Head, float]:
    """Without CLIP's text tower, whose scores are on another scale."""
    return {head: score for head, score in scores.items() if head[0] != "text"}


class TaylorByLayer:
    """Taylor pruning as an order: the same number of heads from each layer, or None if a budget does not allow that."""

    def __init__(self, model: PreTrainedModel, data: Any, prompts: Mapping[str, Any]):
        self.model, self.data, self.prompts = model, data, prompts
        per_layer = Counter(head[:-1] for head in heads_of(prune_heads(model)) if head[0] != "text")
        self.layers, self.sizes = len(per_layer), set(per_layer.values())
        self.found: dict[int, TaylorPruning] = {}

    def __call__(self, budget: int) -> list[Head] | None:
        kept = max(self.sizes) - budget // self.layers
        if len(self.sizes) > 1 or budget % self.layers or kept < 1:
            return None
        if budget not in self.found:
            self.found[budget] = taylor_prune(self.model, self.data, heads_per_layer=kept, **self.prompts)
        return as_heads(self.found[budget].heads_to_prune)
