"""Heads and neurons of a one-member Hydra, layer by layer: what reads their outputs, and which weights are theirs."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fusion import attention_names, qkv_by_head, tower_configs
from ..models.configuration_hydra import neurons_in
from .heads import Head, attention_of, chosen_towers, has_two_towers, head_at, heads_of, prune_heads, tower_and_place


Unit = Head  # a head (layer, head) or a neuron (layer, neuron), for CLIP (tower, layer, ...)
Layer = tuple  # (layer,), or (tower, layer)


class UnitLayer(NamedTuple):
    """The heads, or the neurons, of one layer.

    reader: the module that reads what they give, `width` numbers of each, one after the other: (..., units * width)
    incoming, outgoing: the weights before and behind them
    by_incoming, by_outgoing: turn a tensor of such a weight's shape into (parts, units, numbers)
    """

    reader: nn.Module
    width: int
    incoming: nn.Parameter
    outgoing: nn.Parameter
    by_incoming: Callable[[Tensor], Tensor]
    by_outgoing: Callable[[Tensor], Tensor]


# From a one-member Hydra and its towers to their units, in order, and the layers of these.
UnitsOf = Callable[[PreTrainedModel, Sequence[str] | None], tuple[list[Unit], dict[Layer, UnitLayer]]]


def units_to_score(
    model: PreTrainedModel, towers: Sequence[str] | None, units_of: UnitsOf
) -> tuple[PreTrainedModel, list[Unit], dict[Layer, UnitLayer]]:
    """A copy of the model to score on, its units, and their layers; of two towers the vision tower where none is named,
    because scores of the two are not on one scale."""
    hydra = working_copy(model)
    return hydra, *units_of(hydra, scored_towers(hydra, towers))


def working_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A one-member Hydra of its own, in at least float32: sums of gradients need the digits."""
    hydra = prune_heads(model)
    return hydra if hydra.dtype == torch.float64 else hydra.float()


def scored_towers(hydra: PreTrainedModel, towers: Sequence[str] | None) -> Sequence[str] | None:
    return ["vision"] if towers is None and has_two_towers(hydra) else towers


def head_layers(hydra: PreTrainedModel, towers: Sequence[str] | None) -> tuple[list[Unit], dict[Layer, UnitLayer]]:
    heads = heads_of(hydra, towers)
    return heads, layers_of_heads(hydra, heads)


def layers_of_heads(hydra: PreTrainedModel, heads: Sequence[Head]) -> dict[Layer, UnitLayer]:
    """The layers of these heads. A key and value that several heads read counts for each of them."""
    layers = {}
    for layer in dict.fromkeys(head[:-1] for head in heads):
        attention = attention_of(hydra, *tower_and_place((*layer, 0))[:2])
        layers[layer] = UnitLayer(
            attention.o_proj,
            attention.head_dim,
            attention.qkv_proj.weight,
            attention.o_proj.weight,
            lambda tensor, attention=attention: qkv_by_head(tensor, attention).flatten(2),
            lambda tensor, width=attention.head_dim: tensor.unflatten(0, (1, -1, width)).flatten(2),
        )
    return layers


def neuron_layers(hydra: PreTrainedModel, towers: Sequence[str] | None) -> tuple[list[Unit], dict[Layer, UnitLayer]]:
    neurons, layers, names = [], {}, attention_names(hydra)
    for tower in chosen_towers(hydra, towers):
        config = tower_configs(hydra.config)[tower]
        for layer in range(config.num_hidden_layers):
            kept = config.kept_neurons
            numbers = range(config.layer_spec.inner_size) if kept is None else neurons_in(kept[layer][0])
            neurons += [head_at(tower, layer, number) for number in numbers]
            mlp = hydra.get_submodule(f"{names[tower][layer].removesuffix('attention')}mlp")
            layers[neurons[-1][:-1]] = UnitLayer(
                mlp.fc2,
                1,
                mlp.fc1.weight,
                mlp.fc2.weight,
                lambda tensor, parts=2 if mlp.has_gate else 1: tensor.unflatten(0, (parts, -1)),
                lambda tensor: tensor.t().unsqueeze(0),
            )
    return neurons, layers


def by_unit(units: Sequence[Unit], of_layers: Mapping[Layer, Tensor]) -> dict[Unit, float]:
    """{unit: score} of one tensor (units,) per layer; refuses NaN."""
    scores = {layer: iter(values.tolist()) for layer, values in of_layers.items()}
    found = {unit: next(scores[unit[:-1]]) for unit in units}
    for unit, score in found.items():
        if score != score:
            raise ValueError(f"the score of {unit} is NaN: check the model's weights and the data")
    return found
