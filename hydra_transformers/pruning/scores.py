"""How important heads and neurons are, by the name of a method: `{(layer, head): score}`, the lowest go first."""

import inspect
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from .attention_scores import attention_scores, largest_weight, minus_entropy
from .extraction import GreedySearch, extract_circuit
from .gradient_scores import michel_scores, taylor_scores
from .heads import Head, Prompts, Towers, as_heads_to_prune, check_count, heads_of
from .oba import oba_scores
from .objectives import Metric, minus_loss_of
from .units import (
    Unit,
    UnitsOf,
    by_layer,
    by_unit,
    check_finite,
    head_layers,
    neuron_layers,
    units_to_score,
    working_copy,
)


def magnitude_scores(
    model: PreTrainedModel, *, towers: Towers | None = None, units_of: UnitsOf = head_layers
) -> dict[Unit, float]:
    """The Euclidean norm of a unit's weights. A head: its rows of q, k and v and its part of the output projection (with the
    scale after it, where a family has one). A neuron: its rows of the MLP's first map and its column of the second."""
    _, units, layers = units_to_score(model, towers, units_of)
    squares = {
        place: layer.rows(layer.before.weight.detach().square()).sum(dim=(0, 2))
        + layer.columns(layer.after.weight.detach().square()).sum(dim=(0, 2))
        for place, layer in layers.items()
    }
    return by_unit(units, {place: each.sqrt() for place, each in squares.items()})


def random_scores(
    model: PreTrainedModel, *, towers: Towers | None = None, seed: int = 0, units_of: UnitsOf = head_layers
) -> dict[Unit, float]:
    """Random numbers between 0 and 1: any other score has to do better."""
    _, units, _ = units_to_score(model, towers, units_of)
    numbers = torch.rand(len(units), generator=torch.Generator().manual_seed(seed), dtype=torch.float64, device="cpu")
    return dict(zip(units, numbers.tolist(), strict=True))


def leave_one_out_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    metric: Metric | None = None,
) -> dict[Head, float]:
    """How much worse the model is without the head: its metric as it is minus its metric with the head turned off.

    metric: as for `extract_circuit`; by default minus the loss, so that a score is the rise of the loss
    """
    metric = minus_loss_of(model) if metric is None else metric
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
    dtype: torch.dtype | None = None,
) -> dict[Head, float]:
    """How many heads went before this one in a circuit; heads that the circuit does not rank share the highest score.

    metric: `objective` of `extract_circuit`; mode, dtype: as there
    budget: how many heads to rank; by default all but one
    """
    heads = heads_of(working_copy(model), towers)
    settings = {"class_prompts": class_prompts, "towers": towers, "mode": mode, "dtype": dtype, "progress": False}
    budget = len(heads) - 1 if budget is None else budget
    circuit = extract_circuit(model, data, objective=metric, budget=budget, **settings)
    places = {head: float(place) for place, head in enumerate(circuit.ranking)}
    return {head: places.get(head, float(len(places))) for head in heads}


# A method takes (model, data, *, class_prompts, towers, ...), as far as its signature names them, and returns {head: score}.
HEAD_SCORES: dict[str, Callable[..., dict[Head, float]]] = {
    "michel": michel_scores,
    "taylor": taylor_scores,
    "oba": oba_scores,
    "magnitude": magnitude_scores,
    "entropy": partial(attention_scores, minus_entropy),
    "confidence": partial(attention_scores, largest_weight),
    "leave_one_out": leave_one_out_scores,
    "circuit": circuit_scores,
    "random": random_scores,
}
"""The methods of `head_scores`, by name."""

# Those that score all neurons at once; turning neurons off one by one would take too long.
NEURON_SCORES: dict[str, Callable[..., dict[Unit, float]]] = {
    name: partial(method, units_of=neuron_layers)
    for name, method in HEAD_SCORES.items()
    if "units_of" in inspect.signature(method).parameters
}
"""The methods of `neuron_scores`, by name."""


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
    """How important each head is, the higher the more. `model` stays as it is.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data: data with labels (for "entropy" and "confidence" also without): a DataLoader, a list of dict batches, or a
            Dataset or list of dict rows. "magnitude" and "random" need none.
        method: "michel" (the loss's gradient in a gate on the head), "taylor" (|weight · gradient|), "oba" (the loss's second
            order), "magnitude" (the norm of its weights), "entropy" and "confidence" (how sharply it attends),
            "leave_one_out" (what is lost without it), "circuit" (when greedy removal takes it) or "random".
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers: for CLIP, the towers to score: by default the vision tower, as scores of the two are not on one scale, and both
            for "leave_one_out" and "circuit", where they are.
        normalize: divide the scores of a layer by their Euclidean norm, as Michel et al. do before they compare layers.
        options: those of the method: `metric` of "leave_one_out" and "circuit" (a function of logits and labels, higher is
            better), `budget`, `mode` and `dtype` of "circuit", `seed` of "random".

    Returns `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`; `lowest_heads` turns them into heads to prune.
    """
    return _scores(HEAD_SCORES, model, data, method, class_prompts, towers, normalize, options)


def neuron_scores(
    model: PreTrainedModel,
    data: Any = None,
    method: str = "michel",
    *,
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
    normalize: bool = False,
    **options: Any,
) -> dict[Unit, float]:
    """How important each neuron of the MLPs is, `{(layer, neuron): score}`, the higher the more. `lowest_neurons` turns the
    scores into neurons to prune.

    method: "michel" (the loss's gradient in a gate on the neuron), "taylor" (|weight · gradient|), "magnitude" (the norm of its
        weights) or "random" (with `seed`); all other arguments as for `head_scores`
    """
    return _scores(NEURON_SCORES, model, data, method, class_prompts, towers, normalize, options)


def _scores(
    methods: Mapping[str, Callable[..., dict[Unit, float]]],
    model: PreTrainedModel,
    data: Any,
    method: str,
    class_prompts: Prompts | None,
    towers: Towers | None,
    normalize: bool,
    options: Mapping[str, Any],
) -> dict[Unit, float]:
    """Calls a method with the arguments it accepts; it must accept all `options`."""
    if method not in methods:
        raise ValueError(f"method is {method!r}: pass one of {', '.join(map(repr, methods))}")
    accepted = [name for name in inspect.signature(methods[method]).parameters if name != "units_of"]
    for name in options:
        if name not in accepted:
            own = [each for each in accepted if each not in ("model", "data", "class_prompts", "towers")]
            instead = f"it takes {', '.join(own)}" if own else "leave it out"
            raise TypeError(f"{name} is no option of {method!r}: {instead}")
    if "data" in accepted and data is None:
        raise ValueError(f"data is missing: {method!r} is computed on data, pass some rows with labels")
    given = {"data": data, "class_prompts": class_prompts, "towers": towers}
    scores = methods[method](model, **{name: given[name] for name in given if name in accepted}, **options)
    check_finite(scores)
    return normalized(scores) if normalize else scores


def normalized(scores: Mapping[Unit, float]) -> dict[Unit, float]:
    """Scores divided by the Euclidean norm of all in their layer; a layer of zeros stays."""
    squares: dict[tuple, float] = {}
    for unit, score in scores.items():
        squares[unit[:-1]] = squares.get(unit[:-1], 0.0) + score**2
    return {unit: score / (math.sqrt(squares[unit[:-1]]) or 1.0) for unit, score in scores.items()}


def lowest_heads(
    scores: Mapping[Head, float], budget: int | None = None, *, heads_per_layer: int | None = None
) -> dict:
    """The heads with the lowest scores, as `prune_heads` and `ablated` take them; of equal ones the first in order.

    budget: how many heads go in all
    heads_per_layer: instead, how many each layer keeps; `to_transformers` may need layers of equal size
    """
    return _lowest(scores, budget, heads_per_layer, "heads", fewest_left=0)


def lowest_neurons(
    scores: Mapping[Unit, float], budget: int | None = None, *, neurons_per_layer: int | None = None
) -> dict:
    """The neurons with the lowest scores, as `prune_neurons` takes them; of equal ones the first in order. The highest of each
    layer always stays.

    budget: how many neurons go in all; neurons_per_layer: instead, how many each layer keeps
    """
    return _lowest(scores, budget, neurons_per_layer, "neurons", fewest_left=1)


def _lowest(
    scores: Mapping[Unit, float], budget: int | None, per_layer: int | None, what: str, fewest_left: int
) -> dict:
    """fewest_left: how many a layer keeps at least"""
    if (budget is None) == (per_layer is None):
        raise ValueError(
            f"pass either budget, how many {what} go in all, or {what}_per_layer, how many each layer keeps"
        )
    check_finite(scores)
    order = sorted(scores, key=scores.__getitem__)
    layers = by_layer(order).values()
    fewest = min(map(len, layers), default=0)
    if per_layer is not None:
        check_count(per_layer, f"{what}_per_layer", fewest_left, fewest, f"the layers have {fewest} {what} or more")
    left = per_layer or fewest_left
    can_go = {unit for units in layers for unit in units[: len(units) - left]}
    order = [unit for unit in order if unit in can_go]
    if budget is not None:
        check_count(budget, "budget", 0, len(order), f"{len(order)} {what} can go")
    return as_heads_to_prune(order[:budget])
