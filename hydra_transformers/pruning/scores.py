"""How important heads are, by any of the ways that are known here: `{(layer, head): score}`, the lowest go first."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.evaluation_data import check_label_range
from ..fusion import qkv_by_head
from .attention_scores import confidence_scores, entropy_scores
from .extraction import extract_circuit, start_search
from .heads import Head, as_heads_to_prune, attention_of, check_count, has_two_towers, heads_of, tower_and_place
from .michel import in_order, michel_scores
from .oba import oba_scores
from .objectives import Metric
from .taylor import settled_towers, taylor_scores, working_copy


def magnitude_scores(model: PreTrainedModel, *, towers: Sequence[str] | None = None) -> dict[Head, float]:
    """The Euclidean norm of a head's weights: its rows of q, k and v and its part of the output projection (with the scale
    behind it, where a family has one). A key and value that several heads read counts for each of them. Needs no data."""
    hydra = working_copy(model)
    heads = heads_of(hydra, settled_towers(hydra, towers))
    squares = {}
    for layer in dict.fromkeys(head[:-1] for head in heads):
        attention = attention_of(hydra, *tower_and_place((*layer, 0))[:2])
        # (projections, heads, head_dim, hidden), of q, k, v and the output
        output = attention.o_proj.weight.unflatten(0, (1, -1, attention.head_dim))
        rows = torch.cat([qkv_by_head(attention.qkv_proj.weight, attention), output]).detach()
        squares[layer] = rows.square().sum(dim=(0, 2, 3))
    return {head: math.sqrt(square) for head, square in in_order(heads, squares).items()}


def random_scores(model: PreTrainedModel, *, towers: Sequence[str] | None = None, seed: int = 0) -> dict[Head, float]:
    """Numbers between 0 and 1, drawn with `seed`: what any other score has to be better than."""
    hydra = working_copy(model)
    heads = heads_of(hydra, settled_towers(hydra, towers))
    return drawn(heads, seed)


def drawn(units: Sequence[Head], seed: int) -> dict[Head, float]:
    numbers = torch.rand(len(units), generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return dict(zip(units, numbers.tolist(), strict=True))


def leave_one_out_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    metric: Metric | None = None,
) -> dict[Head, float]:
    """How much worse the model is without the head: the metric of the model as it is minus that with the head turned off.

    metric: as for `extract_circuit`; by default minus the loss, so that a score is by how much the loss rises
    """
    if metric is None:
        metric = _minus_loss_of(model)
    search = start_search(model, data, None, metric, budget=1, class_prompts=class_prompts, towers=towers)
    scores, current = search.evaluate(search.engine.heads)
    return {head: current.value - score.value for head, score in scores.items()}


def circuit_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    metric: Metric | str = "acc",
    budget: int | None = None,
    mode: str = "exact",
    dtype: torch.dtype | None = None,
) -> dict[Head, float]:
    """How many heads went before this one in a circuit (`extract_circuit`, whose arguments these are); heads that the circuit
    does not rank all have the highest score.

    budget: how many heads to rank; by default all but one
    """
    hydra = working_copy(model)
    heads = heads_of(hydra, towers)
    circuit = extract_circuit(
        model,
        data,
        objective=metric,
        budget=len(heads) - 1 if budget is None else budget,
        class_prompts=class_prompts,
        towers=towers,
        mode=mode,
        dtype=dtype,
        progress=False,
    )
    places = {head: float(place) for place, head in enumerate(circuit.ranking)}
    return {head: places.get(head, float(len(places))) for head in heads}


# By name, what scores heads: (model, data, *, class_prompts, towers, ...) -> {head: score}, where a function names
# what it needs. Another score is one line here.
HEAD_SCORES: dict[str, Callable[..., dict[Head, float]]] = {
    "michel": michel_scores,
    "taylor": taylor_scores,
    "oba": oba_scores,
    "magnitude": magnitude_scores,
    "entropy": entropy_scores,
    "confidence": confidence_scores,
    "leave_one_out": leave_one_out_scores,
    "circuit": circuit_scores,
    "random": random_scores,
}
"""The methods of `head_scores`, by name."""


def head_scores(
    model: PreTrainedModel,
    data: Any = None,
    method: str = "michel",
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    normalize: bool = False,
    **options: Any,
) -> dict[Head, float]:
    """How important each head is; the higher, the more. `model` is left as it is.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data: data with labels (for "entropy" and "confidence" also without): a DataLoader, a list of dict batches, or a
            Dataset or list of dict rows. "magnitude" and "random" need none.
        method: "michel" (the loss's gradient in a gate on the head), "taylor" (|weight · gradient|), "oba" (the loss's second
            order), "magnitude" (the norm of its weights), "entropy" and "confidence" (how sharply it looks),
            "leave_one_out" (what is lost without it), "circuit" (when greedy removal takes it) or "random".
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers: for CLIP, the towers to score: by default the vision tower, as scores of the two are not on one scale, and both
            for "leave_one_out" and "circuit", where they are.
        normalize: divide the scores of a layer by their Euclidean norm, as Michel et al. do before they compare layers.
        options: those of the method: `metric` of "leave_one_out" and "circuit" (a function of logits and labels, higher being
            better), `budget`, `mode` and `dtype` of "circuit", `seed` of "random".

    Returns `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`; `lowest_heads` makes heads to prune of them.
    """
    common = {"class_prompts": class_prompts, "towers": towers}
    scores = by_method(HEAD_SCORES, model, data, method, common, options)
    return normalized(scores) if normalize else scores


def by_method(
    methods: Mapping[str, Callable[..., dict[Head, float]]],
    model: PreTrainedModel,
    data: Any,
    method: str,
    common: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[Head, float]:
    """The scores of the method of this name, which is told what it names.

    common: arguments that a method need not have; options: those that it must have
    """
    if method not in methods:
        raise ValueError(f"method is {method!r}: pass one of {', '.join(map(repr, methods))}")
    taken = inspect.signature(methods[method]).parameters
    for name in options:
        if name not in taken:
            own = [each for each in taken if each not in ("model", "data", *common)]
            instead = f"it takes {', '.join(own)}" if own else "leave it out"
            raise TypeError(f"{name} is no option of {method!r}: {instead}")
    needs_data = "data" in taken
    if needs_data and data is None:
        raise ValueError(f"data is missing: {method!r} is computed on data, pass some rows with labels")
    given = {name: value for name, value in common.items() if name in taken}
    scores = methods[method](model, *([data] if needs_data else []), **given, **options)
    check_finite(scores)
    return scores


def check_finite(scores: Mapping[Head, float]) -> None:
    """Refuses scores that have no order."""
    for head, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"the score of {head} is {score}: check the model's weights and the data")


def normalized(scores: Mapping[Head, float]) -> dict[Head, float]:
    """Scores divided by the Euclidean norm of all in their layer; a layer of zeros stays."""
    squares: dict[tuple, float] = {}
    for head, score in scores.items():
        squares[head[:-1]] = squares.get(head[:-1], 0.0) + score**2
    return {head: score / (math.sqrt(squares[head[:-1]]) or 1.0) for head, score in scores.items()}


def lowest_heads(
    scores: Mapping[Head, float], budget: int | None = None, *, heads_per_layer: int | None = None
) -> dict:
    """The heads with the lowest scores as `prune_heads` and `ablated` take them; of equal ones the first in order.

    budget: how many in all
    heads_per_layer: in place of it, how many each layer keeps: equal layers, which `to_transformers` can ask for
    """
    if (budget is None) == (heads_per_layer is None):
        raise ValueError("pass either budget, how many heads go in all, or heads_per_layer, how many each layer keeps")
    check_finite(scores)
    order = sorted(scores, key=scores.__getitem__)
    if budget is not None:
        check_count(budget, "budget", 0, len(order), f"{len(order)} heads have scores")
        return as_heads_to_prune(order[:budget])
    return lowest_of_layers(order, heads_per_layer, 0, "heads")


def lowest_of_layers(order: Sequence[Head], per_layer: int, fewest_left: int, what: str) -> dict:
    """Of units in ascending order of their scores all but the last `per_layer` of each layer, as `prune_heads` takes them.

    fewest_left: what `per_layer` must be at least; what: "heads" or "neurons"
    """
    layers: dict[tuple, list[Head]] = {}
    for unit in order:
        layers.setdefault(unit[:-1], []).append(unit)
    fewest = min(map(len, layers.values()), default=0)
    check_count(per_layer, f"{what}_per_layer", fewest_left, fewest, f"the layers have {fewest} {what} or more")
    return as_heads_to_prune(unit for of_layer in layers.values() for unit in of_layer[: len(of_layer) - per_layer])


def _minus_loss_of(model: PreTrainedModel) -> Metric:
    """Minus the loss that the model is trained with, over all samples."""
    config = model.config
    problem = getattr(config, "problem_type", None)
    if problem is None and not has_two_towers(model) and config.num_labels == 1:
        problem = "regression"

    def minus_loss(logits: Tensor, labels: Tensor) -> float:
        if problem == "regression":
            return -nn.functional.mse_loss(logits.flatten(), labels.flatten().to(logits.dtype)).item()
        if problem == "multi_label_classification":
            return -nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits.dtype)).item()
        if labels.is_floating_point() or labels.dim() > 1:
            raise ValueError(
                f"the labels are {labels.dtype} of shape {tuple(labels.shape)}: pass class indices, one for each row, set "
                "config.problem_type, or pass a metric"
            )
        check_label_range(labels, "data", logits.shape[-1])
        return -nn.functional.cross_entropy(logits, labels).item()

    return minus_loss
