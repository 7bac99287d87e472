"""The heads, or the MLP neurons, of a one-member Hydra layer by layer, with their weights."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fusion import attention_names, qkv_by_head, tower_configs
from ..models.configuration_hydra import neurons_in
from .heads import (
    Head,
    Towers,
    attention_of,
    chosen_towers,
    has_two_towers,
    head_at,
    heads_of,
    prune_heads,
    tower_and_place,
)


Unit = Head  # a head (layer, head) or a neuron (layer, neuron), for CLIP (tower, layer, ...)
Layer = tuple  # (layer,), or (tower, layer)


class UnitLayer(NamedTuple):
    """The heads, or the neurons, of one layer.

    before, after: the linear maps before and after them; `after` reads (..., units * width)
    rows, columns: reshape a tensor like `before.weight`, or like `after.weight`, to (parts, units, numbers)
    """

    before: nn.Module
    after: nn.Module
    width: int
    rows: Callable[[Tensor], Tensor]
    columns: Callable[[Tensor], Tensor]


# From a one-member Hydra and its towers to their units, in order, and the layers of these.
UnitsOf = Callable[[PreTrainedModel, Towers | None], tuple[list[Unit], dict[Layer, UnitLayer]]]


def working_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A one-member Hydra to score on, at least in float32: sums of gradients need the digits."""
    hydra = prune_heads(model)
    return hydra if hydra.dtype == torch.float64 else hydra.float()


def scored_towers(hydra: PreTrainedModel, towers: Towers | None) -> Towers | None:
    """By default the vision tower alone: scores of two towers are not on one scale."""
    return ["vision"] if towers is None and has_two_towers(hydra) else towers


def units_to_score(
    model: PreTrainedModel, towers: Towers | None, units_of: UnitsOf
) -> tuple[PreTrainedModel, list[Unit], dict[Layer, UnitLayer]]:
    """A copy of the model to score on, its units, and their layers."""
    hydra = working_copy(model)
    return hydra, *units_of(hydra, scored_towers(hydra, towers))


def head_layers(hydra: PreTrainedModel, towers: Towers | None) -> tuple[list[Unit], dict[Layer, UnitLayer]]:
    heads = heads_of(hydra, towers)
    return heads, layers_of_heads(hydra, heads)


def layers_of_heads(hydra: PreTrainedModel, heads: Iterable[Head]) -> dict[Layer, UnitLayer]:
    """The layers of these heads. A key and value that several heads read counts for each of them."""
    layers = {}
    for layer in by_layer(heads):
        attention = attention_of(hydra, *tower_and_place((*layer, 0))[:2])
        layers[layer] = UnitLayer(
            attention.qkv_proj,
            attention.o_proj,
            attention.head_dim,
            lambda tensor, attention=attention: qkv_by_head(tensor, attention).flatten(2),
            lambda tensor, width=attention.head_dim: tensor.unflatten(0, (1, -1, width)).flatten(2),
        )
    return layers


def neuron_layers(hydra: PreTrainedModel, towers: Towers | None) -> tuple[list[Unit], dict[Layer, UnitLayer]]:
    neurons, layers, names = [], {}, attention_names(hydra)
    for tower in chosen_towers(hydra, towers):
        config = tower_configs(hydra.config)[tower]
        for layer in range(len(config.kept_heads)):
            kept = config.kept_neurons
            numbers = range(config.layer_spec.inner_size) if kept is None else neurons_in(kept[layer][0])
            neurons += [head_at(tower, layer, number) for number in numbers]
            mlp = hydra.get_submodule(f"{names[tower][layer].removesuffix('attention')}mlp")
            layers[neurons[-1][:-1]] = UnitLayer(
                mlp.fc1,
                mlp.fc2,
                1,
                lambda tensor, parts=2 if mlp.has_gate else 1: tensor.unflatten(0, (parts, -1)),
                lambda tensor: tensor.t().unsqueeze(0),
            )
    return neurons, layers


def by_layer(units: Iterable[Unit]) -> dict[Layer, list[Unit]]:
    layers: dict[Layer, list[Unit]] = {}
    for unit in units:
        layers.setdefault(unit[:-1], []).append(unit)
    return layers


def by_unit(units: Sequence[Unit], of_layers: Mapping[Layer, Tensor]) -> dict[Unit, float]:
    """{unit: score} from one tensor (units,) per layer."""
    left = {layer: iter(values.tolist()) for layer, values in of_layers.items()}
    scores = {unit: next(left[unit[:-1]]) for unit in units}
    check_finite(scores)
    return scores


def check_finite(scores: Mapping[Unit, float]) -> None:
    for unit, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"the score of {unit} is {score}: check the model's weights and the data")
