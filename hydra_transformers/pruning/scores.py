"""How important heads and neurons are, by name of the method: `{(layer, head): score}`, the lowest go first."""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.evaluation_data import check_label_range
from .attention_scores import confidence_scores, entropy_scores
from .extraction import extract_circuit, start_search
from .heads import Head, as_heads_to_prune, check_count, has_two_towers, heads_of
from .michel import michel_scores
from .oba import oba_scores
from .objectives import Metric
from .taylor import taylor_scores
from .units import Unit, UnitsOf, by_unit, head_layers, neuron_layers, units_to_score, working_copy


def magnitude_scores(
    model: PreTrainedModel, *, towers: Sequence[str] | None = None, units_of: UnitsOf = head_layers
) -> dict[Unit, float]:
    """The Euclidean norm of a head's weights: its rows of q, k and v and its part of the output projection (with the scale
    behind it, where a family has one); of a neuron's, its rows of the MLP's first map and its column of the second. Needs no
    data."""
    _, units, layers = units_to_score(model, towers, units_of)
    squares = {
        place: layer.by_incoming(layer.incoming.detach().square()).sum(dim=(0, 2))
        + layer.by_outgoing(layer.outgoing.detach().square()).sum(dim=(0, 2))
        for place, layer in layers.items()
    }
    return by_unit(units, {place: each.sqrt() for place, each in squares.items()})


def random_scores(
    model: PreTrainedModel, *, towers: Sequence[str] | None = None, seed: int = 0, units_of: UnitsOf = head_layers
) -> dict[Unit, float]:
    """Numbers between 0 and 1, drawn with `seed`: what any other score has to be better than."""
    _, units, _ = units_to_score(model, towers, units_of)
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

# The same for neurons. What turns off one after the other would take too long.
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


def neuron_scores(
    model: PreTrainedModel,
    data: Any = None,
    method: str = "michel",
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    normalize: bool = False,
    **options: Any,
) -> dict[Unit, float]:
    """How important each neuron of the MLPs is, `{(layer, neuron): score}`; the higher, the more. `lowest_neurons` makes
    neurons to prune of them.

    method: "michel" (the loss's gradient in a gate on the neuron), "taylor" (|weight · gradient|), "magnitude" (the norm of its
        weights) or "random" (with `seed`); everything else as for `head_scores`
    """
    common = {"class_prompts": class_prompts, "towers": towers}
    scores = by_method(NEURON_SCORES, model, data, method, common, options)
    return normalized(scores) if normalize else scores


def by_method(
    methods: Mapping[str, Callable[..., dict[Head, float]]],
    model: PreTrainedModel,
    data: Any,
    method: str,
    common: Mapping[str, Any],
    options: Mapping[str, Any],
) -> dict[Head, float]:
    """Calls the method of this name with the arguments it accepts.

    common: arguments that a method need not have; options: those that it must have
    """
    if method not in methods:
        raise ValueError(f"method is {method!r}: pass one of {', '.join(map(repr, methods))}")
    taken = [name for name in inspect.signature(methods[method]).parameters if name != "units_of"]
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
    return _lowest(scores, budget, heads_per_layer, "heads", fewest_left=0)


def lowest_neurons(
    scores: Mapping[Unit, float], budget: int | None = None, *, neurons_per_layer: int | None = None
) -> dict:
    """The neurons with the lowest scores as `prune_neurons` takes them; of equal ones the first in order. The highest of each
    layer always stays.

    budget: how many in all; neurons_per_layer: in place of it, how many each layer keeps
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
    layers: dict[tuple, list[Unit]] = {}
    for unit in order:
        layers.setdefault(unit[:-1], []).append(unit)
    fewest = min(map(len, layers.values()), default=0)
    if per_layer is not None:
        check_count(per_layer, f"{what}_per_layer", fewest_left, fewest, f"the layers have {fewest} {what} or more")
    left = per_layer or fewest_left
    gone = {unit for of_layer in layers.values() for unit in of_layer[: len(of_layer) - left]}
    order = [unit for unit in order if unit in gone]
    if budget is not None:
        check_count(budget, "budget", 0, len(order), f"{len(order)} {what} can go")
    return as_heads_to_prune(order[:budget])


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
