"""Neurons of the MLPs, between their two maps: cutting them out, and how important they are.

A neuron is `(layer, neuron)`, for CLIP `(tower, layer, neuron)`, with the backbone's numbers. Most of a layer's multiply-adds are
in its MLP, so that is where pruning saves time.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fusion import attention_names, tower_configs, without_neurons
from ..models.auto import hydra_class
from ..models.configuration_hydra import neurons_in
from .heads import Head, as_heads_to_prune, check_count, chosen_towers, head_at, tower_and_place
from .michel import Gated, in_order, mean_gradients
from .scores import by_method, check_finite, drawn, lowest_of_layers, normalized
from .taylor import Calibration, settled_towers, working_copy


Neuron = Head


def prune_neurons(model: PreTrainedModel, neurons_to_prune: dict) -> PreTrainedModel:
    """A one-member Hydra of `model` with neurons of its MLPs cut out; `model` is left as it is.

    model: as for `prune_heads`, which can come before or after
    neurons_to_prune: `{layer: [neurons]}`, which leaves at least one in each layer; for CLIP `{"vision": {layer: [neurons]},
        "text": {layer: [neurons]}}`

    Fused by `from_pruned_members`, members that keep different neurons cannot share their MLPs: pass `shared` without "mlp".
    """
    return without_neurons(hydra_class(model), model, neurons_to_prune)


def neurons_of(hydra: PreTrainedModel, towers: Sequence[str] | None = None) -> list[Neuron]:
    """The neurons that a one-member Hydra has, in order; of CLIP's towers only those in `towers`."""
    found = []
    for tower in chosen_towers(hydra, towers):
        config = tower_configs(hydra.config)[tower]
        for layer in range(config.num_hidden_layers):
            kept = config.kept_neurons
            numbers = range(config.layer_spec.inner_size) if kept is None else neurons_in(kept[layer][0])
            found += [head_at(tower, layer, number) for number in numbers]
    return found


def _mlps(hydra: PreTrainedModel, neurons: Sequence[Neuron]) -> dict[tuple, nn.Module]:
    """The MLPs of the neurons' layers, by (layer,) or (tower, layer)."""
    names = attention_names(hydra)
    return {
        layer: hydra.get_submodule(f"{names[tower][place].removesuffix('attention')}mlp")
        for layer in dict.fromkeys(neuron[:-1] for neuron in neurons)
        for tower, place, _ in [tower_and_place((*layer, 0))]
    }


def michel_scores_of_neurons(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
) -> dict[Neuron, float]:
    """The mean over the samples of |∂L(x) / ∂ξ|, with ξ a gate of 1 on what the neuron gives to the second map."""
    hydra = working_copy(model)
    calibration = Calibration(hydra, data, class_prompts)
    neurons = neurons_of(hydra, settled_towers(hydra, towers))
    gated = {layer: Gated(mlp.fc2, 1) for layer, mlp in _mlps(hydra, neurons).items()}
    return in_order(neurons, mean_gradients(hydra, calibration, gated))


def taylor_scores_of_neurons(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
) -> dict[Neuron, float]:
    """The mean of |W · G| over the neuron's row of the first map (and that of its gate), with G the gradient of the mean loss
    over the whole of `data`."""
    hydra = working_copy(model)
    calibration = Calibration(hydra, data, class_prompts)
    neurons = neurons_of(hydra, settled_towers(hydra, towers))
    mlps = _mlps(hydra, neurons)
    weights = [mlp.fc1.weight for mlp in mlps.values()]
    of_layers = {}
    for (layer, mlp), weight, gradient in zip(
        mlps.items(), weights, calibration.gradients(hydra, weights), strict=True
    ):
        products = (weight.detach() * gradient).abs().unflatten(0, (2 if mlp.has_gate else 1, -1))
        of_layers[layer] = products.mean(dim=(0, 2))
    return in_order(neurons, of_layers)


def magnitude_scores_of_neurons(model: PreTrainedModel, *, towers: Sequence[str] | None = None) -> dict[Neuron, float]:
    """The Euclidean norm of a neuron's weights: its row of the first map (and that of its gate), its column of the second."""
    hydra = working_copy(model)
    neurons = neurons_of(hydra, settled_towers(hydra, towers))
    of_layers = {}
    for layer, mlp in _mlps(hydra, neurons).items():
        rows = mlp.fc1.weight.detach().unflatten(0, (2 if mlp.has_gate else 1, -1)).square().sum(dim=(0, 2))
        of_layers[layer] = (rows + mlp.fc2.weight.detach().square().sum(dim=0)).sqrt()
    return in_order(neurons, of_layers)


def random_scores_of_neurons(
    model: PreTrainedModel, *, towers: Sequence[str] | None = None, seed: int = 0
) -> dict[Neuron, float]:
    """Numbers between 0 and 1, drawn with `seed`."""
    hydra = working_copy(model)
    neurons = neurons_of(hydra, settled_towers(hydra, towers))
    return drawn(neurons, seed)


# By name, what scores neurons, as `HEAD_SCORES` is for heads. What turns off one after the other would take too long.
NEURON_SCORES: dict[str, Callable[..., dict[Neuron, float]]] = {
    "michel": michel_scores_of_neurons,
    "taylor": taylor_scores_of_neurons,
    "magnitude": magnitude_scores_of_neurons,
    "random": random_scores_of_neurons,
}
"""The methods of `neuron_scores`, by name."""


def neuron_scores(
    model: PreTrainedModel,
    data: Any = None,
    method: str = "michel",
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    normalize: bool = False,
    **options: Any,
) -> dict[Neuron, float]:
    """How important each neuron of the MLPs is; the higher, the more. `model` is left as it is.

    method: "michel" (the loss's gradient in a gate on the neuron), "taylor" (|weight · gradient|), "magnitude" (the norm of its
        weights) or "random" (with `seed`); everything else as for `head_scores`

    Returns `{(layer, neuron): score}`, for CLIP `{(tower, layer, neuron): score}`; `lowest_neurons` makes neurons to prune of
    them.
    """
    scores = by_method(NEURON_SCORES, model, data, method, {"class_prompts": class_prompts, "towers": towers}, options)
    return normalized(scores) if normalize else scores


def lowest_neurons(
    scores: Mapping[Neuron, float], budget: int | None = None, *, neurons_per_layer: int | None = None
) -> dict:
    """The neurons with the lowest scores as `prune_neurons` takes them; of equal ones the first in order. The highest of each
    layer always stays.

    budget: how many in all; neurons_per_layer: in place of it, how many each layer keeps
    """
    if (budget is None) == (neurons_per_layer is None):
        raise ValueError(
            "pass either budget, how many neurons go in all, or neurons_per_layer, how many each layer keeps"
        )
    check_finite(scores)
    order = sorted(scores, key=scores.__getitem__)
    if neurons_per_layer is not None:
        return lowest_of_layers(order, neurons_per_layer, 1, "neurons")
    stay = {neuron[:-1]: neuron for neuron in order}  # the last, and so the highest, of each layer
    order = [neuron for neuron in order if stay[neuron[:-1]] != neuron]
    check_count(budget, "budget", 0, len(order), f"{len(order)} neurons can go")
    return as_heads_to_prune(order[:budget])
