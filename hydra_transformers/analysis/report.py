"""All analyses of one model in one call, as a folder with a report, results and pictures."""

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from .._io.files import write_atomically
from ..data.batches import batches, split_labels
from ..data.evaluation_data import check_label_range
from ..pruning import Circuit, TaylorPruning, extract_circuit, prune_heads, taylor_prune, taylor_scores
from ..pruning.heads import Head, as_heads, check_count, has_two_towers, heads_of
from .comparison import HeadSetComparison, compare_head_sets
from .foreign_sets import foreign_sets
from .head_sets import as_head_sets, random_order
from .noise import with_noise
from .proposition import PruningUnderNoise, pruning_under_noise
from .separation import HeadSeparation, check_are_enough_rows, head_dim_of, head_separation
from .sweep import BudgetSweep, FineTune, check_prompts, checked_budgets, sweep_budgets
from .towers import HeadScores


CIRCUITS = {"acc": "CircAcc", "ood": "CircOOD", "avg": "CircAvg"}
TAYLOR_BY_LAYER, TAYLOR, RANDOM = "Taylor, by layer", "Taylor", "random"
REPORT, RESULTS = "report.md", "results.json"
RESULT_NAMES = ("sweep", "comparison", "separation", "proposition", "scores")


@dataclass(frozen=True)
class HeadReport:
    """What `analyse_heads` found: one result for each question, each with `to_markdown()` and `plot(folder)`.

    circuits: objective -> the circuit that was extracted
    budget: how many heads the sets that are compared cut out
    """

    budget: int
    circuits: dict[str, Circuit]
    proposition: PruningUnderNoise
    separation: HeadSeparation
    comparison: HeadSetComparison
    sweep: BudgetSweep
    scores: HeadScores
    notes: list[str] = field(default_factory=list)

    def _parts(self) -> Iterator[tuple[str, Any]]:
        yield "How many can go", self.sweep
        yield "Who is pruned", self.comparison
        yield "What heads see", self.separation
        yield "Is pruning worse under noise? (Proposition 1)", self.proposition
        yield "Taylor scores", self.scores

    def to_markdown(self, pictures: Mapping[str, Sequence[Path]] | None = None) -> str:
        """The report as a page: a part for each question, with its tables.

        pictures: by title of a part, those that are shown below it, as paths beside the report
        """
        parts = ["# Heads", *self.notes]
        for title, result in self._parts():
            parts += [f"## {title}", *(f"![]({path})" for path in (pictures or {}).get(title, []))]
            parts.append(result.to_markdown().rstrip())
        return "\n\n".join(parts) + "\n"

    def tables(self) -> dict[str, str]:
        """Every table by part and title, as in "sweep/Accuracy (%)"."""
        found = {}
        for name in RESULT_NAMES:
            for part in f"\n{getattr(self, name).to_markdown()}".split("\n### ")[1:]:
                title, _, table = part.partition("\n")
                found[f"{name}/{title}"] = table.strip()
        return found

    def to_dict(self) -> dict[str, Any]:
        """All results; the circuits are apart."""
        return {"budget": self.budget, **{name: getattr(self, name).to_dict() for name in RESULT_NAMES}}

    def save(self, folder: str | os.PathLike) -> Path:
        """Writes `report.md`, `results.json`, `circuits/` and, where matplotlib is installed, pictures; returns the report's
        path."""
        folder = Path(folder)
        for objective, circuit in self.circuits.items():
            circuit.save(folder / "circuits" / f"{objective}.json")
        pictures: dict[str, list[Path]] = {}
        try:
            for title, result in self._parts():
                pictures[title] = [path.relative_to(folder) for path in result.plot(folder)]
        except ImportError:
            pictures = {}
        write_atomically(folder / RESULTS, json.dumps(self.to_dict(), indent=1) + "\n")
        return write_atomically(folder / REPORT, self.to_markdown(pictures))


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
    tell: Callable[[str], None] = lambda sentence: None,
) -> HeadReport:
    """Which heads see what, who is pruned, how many can go, and whether pruning is worse under noise.

    Heads are chosen by Taylor scores and by circuits for accuracy, detection and both, on `choosing_data` and `choosing_ood_data`;
    everything is judged on `data` and `ood_data`, which must be other rows.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one; left as it is.
        choosing_data, choosing_ood_data: with labels, and foreign: what heads are chosen by.
        data, ood_data: with labels, and foreign (one set, or several as `{name: data}`): what is judged on.
        noisy_data: with labels; by default `data` with Gaussian noise, or of texts with some tokens replaced (`with_noise`).
        budget: how many heads the sets that are compared cut out; by default a quarter.
        budgets: those of the sweep; by default eight up to half of the heads.
        other_head_sets: name -> heads that are compared as well, those of another fine-tuning for example.
        finetune, seconds: see `sweep_budgets`.
        random_orders: how many random orders the sweep has for comparison.
        noise_rows: how many of the rows the loss is looked at on under noise: second derivatives take as long as dozens of
            answers.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        batch_size: rows per batch where data comes in rows.
        circuit_options: further options of `extract_circuit`, such as `{"mode": "shortlist"}`.
        tell: is called with a sentence when a step begins.
    """
    hydra = prune_heads(model)
    heads = heads_of(hydra)
    budget = max(1, len(heads) // 4) if budget is None else budget
    check_count(noise_rows, "noise_rows", 1, 10**9, "the loss is looked at on rows")
    check_count(budget, "budget", 1, len(heads) - 1, f"the model has {len(heads)} heads")
    check_count(random_orders, "random_orders", 0, 10**6, "each is judged at every budget")
    budgets = _usual_budgets(len(heads)) if budgets is None else checked_budgets(budgets, len(heads))
    others = _other_head_sets(other_head_sets, heads)
    check_prompts(hydra, class_prompts)
    prompts = {} if class_prompts is None else {"class_prompts": class_prompts}
    choosing_data, choosing_ood_data, data = (
        list(batches(each, batch_size)) for each in (choosing_data, choosing_ood_data, data)
    )
    ood_data = {name: list(batches(each, batch_size)) for name, each in foreign_sets(ood_data).items()}
    noisy_data = None if noisy_data is None else list(batches(noisy_data, batch_size))
    # What would be refused at the end is refused before circuits are extracted, which takes hours of a large model.
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
        options = {"budget": max(budget, *budgets), "progress": False, "batch_size": batch_size, **prompts}
        options |= circuit_options or {}
        circuits[objective] = orders[name] = extract_circuit(
            model, choosing_data, choosing_ood_data, objective, **options
        )
    orders[RANDOM] = [random_order(model, seed) for seed in range(random_orders)]

    tell("what each budget leaves")
    options = {"finetune": finetune, "seconds": seconds, "batch_size": batch_size, **prompts}
    sweep = sweep_budgets(model, data, ood_data, orders=orders, budgets=budgets, **options)
    tell("what heads see")
    separation = head_separation(
        model,
        data,
        ood_data,
        pruned={CIRCUITS["ood"]: circuits["ood"].first(budget)},
        ranking=circuits["ood"],
        batch_size=batch_size,
    )
    sets = {
        TAYLOR_BY_LAYER: orders[TAYLOR_BY_LAYER](budget),
        TAYLOR: sorted(orders[TAYLOR], key=orders[TAYLOR].__getitem__)[:budget],
        **{name: circuits[objective].first(budget) for objective, name in CIRCUITS.items()},
        RANDOM: orders[RANDOM][0][:budget] if random_orders else None,
    }
    sets = {name: each for name, each in sets.items() if each is not None}
    comparison = compare_head_sets(model, {**sets, **others})
    tell("whether pruning is worse under noise")
    clean = spread(data, noise_rows)
    noisy = with_noise(clean) if noisy_data is None else spread(noisy_data, noise_rows)
    proposition = pruning_under_noise(model, clean, noisy, sets, **prompts)
    return HeadReport(budget, circuits, proposition, separation, comparison, sweep, HeadScores(scores))


def spread(data: Sequence[Mapping[str, Tensor]], rows: int) -> list[dict[str, Tensor]]:
    """About `rows` rows of dict batches, evenly from all of them."""
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
    """Those that the caller has, by names that are not taken."""
    if not given:
        return {}
    sets = as_head_sets(given, "other_head_sets", heads)
    own = {TAYLOR_BY_LAYER, TAYLOR, *CIRCUITS.values(), RANDOM}
    for name in own & set(given):
        raise ValueError(f"other_head_sets has a set named {name!r}, which is made here: name it otherwise")
    return sets


def _usual_budgets(heads: int) -> list[int]:
    return sorted({max(1, heads * part // 16) for part in range(1, 9)})


def _of_data_tower(scores: Mapping[Head, float]) -> dict[Head, float]:
    """For CLIP those of the vision tower: scores of the two towers are not on one scale."""
    return {head: score for head, score in scores.items() if head[0] != "text"}


class TaylorByLayer:
    """Taylor pruning as an order: for a budget the heads that go where every layer loses as many; None where that cannot be."""

    def __init__(self, model: PreTrainedModel, data: Any, prompts: Mapping[str, Any]):
        self.model, self.data, self.prompts = model, data, prompts
        per_layer: dict[tuple, int] = {}
        for head in _of_data_tower(dict.fromkeys(heads_of(prune_heads(model)), 0.0)):
            per_layer[head[:-1]] = per_layer.get(head[:-1], 0) + 1
        self.layers, self.sizes = len(per_layer), set(per_layer.values())
        self.found: dict[int, TaylorPruning] = {}

    def __call__(self, budget: int) -> list[Head] | None:
        kept = max(self.sizes) - budget // self.layers
        if len(self.sizes) > 1 or budget % self.layers or kept < 1:
            return None
        if budget not in self.found:
            self.found[budget] = taylor_prune(self.model, self.data, heads_per_layer=kept, **self.prompts)
        return as_heads(self.found[budget].heads_to_prune)
