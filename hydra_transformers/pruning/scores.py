"""How important heads are, by the name of a method: `{(layer, head): score}`, the lowest go
first.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from .extraction import GreedySearch, extract_circuit
from .gradient_scores import michel_scores, taylor_scores
from .head_weights import by_layer, check_finite, heads_to_score, working_copy
from .heads import Head, Prompts, Towers, as_heads_to_prune, check_count, heads_of
from .oba import oba_scores
from .objectives import Metric, minus_loss_of


def random_scores(model: PreTrainedModel, *, towers: Towers | None = None, seed: int = 0) -> dict[Head, float]:
    """Return random numbers between 0 and 1: any other score has to do better."""
    _, heads, _ = heads_to_score(model, towers)
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.rand(len(heads), generator=generator, dtype=torch.float64, device="cpu")
    return dict(zip(heads, numbers.tolist(), strict=True))


def leave_one_out_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    metric: Metric | None = None,
) -> dict[Head, float]:
    """Return how much worse the model is without each head.

    A score is the model's metric as it is minus its metric with the head turned off.

    metric: as for `extract_circuit`; by default minus the loss, so that a score is the rise of the
        loss
    """
    if metric is None:
        metric = minus_loss_of(model)
    search = GreedySearch(model, data, None, metric, budget=1, class_prompts=class_prompts, towers=towers)
    scores, current = search.evaluate(search.engine.heads)
    return {head: current.value - score.value for head, score in scores.items()}


def circuit_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    metric: Metric | str = "acc",
    budget: int | None = None,
    mode: str = "exact",
) -> dict[Head, float]:
    """Return how many heads go before each head in a circuit.

    Heads that the circuit does not rank share the highest score.

    metric: `objective` of `extract_circuit`
    budget: how many heads to rank; by default all but one
    mode: as for `extract_circuit`
    """
    heads = heads_of(working_copy(model), towers)
    if budget is None:
        budget = len(heads) - 1
    circuit = extract_circuit(
        model,
        data,
        objective=metric,
        budget=budget,
        class_prompts=class_prompts,
        towers=towers,
        mode=mode,
    )
    places = {head: float(place) for place, head in enumerate(circuit.ranking)}
    not_ranked = float(len(places))
    return {head: places.get(head, not_ranked) for head in heads}


# A method takes (model, data, *, class_prompts, towers, ...), as far as its signature names them,
# and returns {head: score}.
HEAD_SCORES: dict[str, Callable[..., dict[Head, float]]] = {
    "michel": michel_scores,
    "taylor": taylor_scores,
    "oba": oba_scores,
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
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    normalize: bool = False,
    **options: Any,
) -> dict[Head, float]:
    """Return how important each head is, the higher the more. `model` stays as it is.

    Args:
        model (`PreTrainedModel`): a classifier or a CLIP model of Transformers, or a one-member
            Hydra of one.
        data (`DataLoader`, `Dataset` or `list`, *optional*): in batches or rows with labels;
            "random" needs none.
        method (`str`, defaults to `"michel"`): "michel" (the loss's gradient in a gate on the
            head), "taylor" (|weight · gradient|), "oba" (the loss's second order), "leave_one_out"
            (what is lost without it), "circuit" (when greedy removal takes it) or "random".
        class_prompts (`dict`, *optional*): for CLIP and SigLIP, the tokenizer's output with one row
            per class.
        towers (`Sequence[str]`, *optional*): for CLIP, the towers to score: by default the vision
            tower, as scores of the two are not on one scale, and both for "leave_one_out" and
            "circuit", where they are.
        normalize (`bool`, defaults to `False`): divide the scores of a layer by their Euclidean
            norm, as Michel et al. do.
        options (*optional*): those of the method: `metric` of "leave_one_out" and "circuit" (a
            function of logits and labels, higher is better), `budget` and `mode` of "circuit",
            `seed` of "random".

    Returns:
        `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`; `lowest_heads` turns
        them into heads to prune.
    """
    if method not in HEAD_SCORES:
        raise ValueError(f"method is {method!r}: pass one of {', '.join(map(repr, HEAD_SCORES))}")
    score = HEAD_SCORES[method]
    accepted = inspect.signature(score).parameters
    if "data" in accepted and data is None:
        raise ValueError(f"data is missing: {method!r} is computed on data, pass some rows with labels")

    arguments = {"data": data, "class_prompts": class_prompts, "towers": towers}
    arguments = {name: value for name, value in arguments.items() if name in accepted}
    scores = score(model, **arguments, **options)
    check_finite(scores)
    if normalize:
        scores = normalized(scores)
    return scores


def normalized(scores: Mapping[Head, float]) -> dict[Head, float]:
    """Return scores divided by the Euclidean norm of all in their layer; a layer of zeros stays."""
    squares: dict[tuple, float] = {}
    for head, score in scores.items():
        layer = head[:-1]
        squares[layer] = squares.get(layer, 0.0) + score**2
    norms = {layer: math.sqrt(square) or 1.0 for layer, square in squares.items()}
    return {head: score / norms[head[:-1]] for head, score in scores.items()}


def lowest_heads(
    scores: Mapping[Head, float], budget: int | None = None, *, heads_per_layer: int | None = None
) -> dict:
    """Return the heads with the lowest scores, as `prune_heads` and `ablated` take them.

    Of equal ones the first in order go.

    Args:
        scores (`dict`): what `head_scores` returns.
        budget (`int`, *optional*): how many heads go in all.
        heads_per_layer (`int`, *optional*): instead, how many each layer keeps; `to_transformers`
            may need equal layers.

    Returns:
        `{layer: [heads]}`, for CLIP by tower.
    """
    if (budget is None) == (heads_per_layer is None):
        raise ValueError("pass either budget, how many heads go in all, or heads_per_layer, how many each layer keeps")
    check_finite(scores)
    order = sorted(scores, key=scores.__getitem__)
    if budget is not None:
        check_count(budget, "budget", 0, len(order), f"{len(order)} heads can go")
        return as_heads_to_prune(order[:budget])

    layers = by_layer(order).values()
    fewest = min(map(len, layers), default=0)
    check_count(heads_per_layer, "heads_per_layer", 0, fewest, f"the layers have {fewest} heads or more")
    lowest = []
    for heads in layers:
        surplus = len(heads) - heads_per_layer
        lowest += heads[:surplus]
    return as_heads_to_prune(lowest)
