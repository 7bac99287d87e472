"""Heads and neurons by number, and cutting them out of a model.

A head is `(layer, head)`, for CLIP `(tower, layer, head)`, with the backbone's numbers, and a neuron of an MLP likewise. The order of heads, which also
decides ties, is that of the towers ("vision" before "text"), then the layer, then the head.
"""

from collections.abc import Iterable, Sequence
from numbers import Integral

from torch import nn
from transformers import PreTrainedModel

from ..fusion import attention_names, encoder_config, tower_configs, without_neurons
from ..models.auto import AutoHydra, hydra_class


Head = tuple[int, int] | tuple[str, int, int]


def prune_heads(model: PreTrainedModel, heads_to_prune: dict | None = None) -> PreTrainedModel:
    """A one-member Hydra of `model` with `heads_to_prune` cut out; `model` is left as it is.

    model: a model of Transformers (`AutoHydra.supported()` lists them), or a one-member Hydra to prune further
    heads_to_prune: `{layer: [heads]}`; for CLIP `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`
    """
    return AutoHydra.from_backbone(model, heads_to_prune)


def prune_neurons(model: PreTrainedModel, neurons_to_prune: dict) -> PreTrainedModel:
    """A one-member Hydra of `model` with neurons of its MLPs cut out; `model` is left as it is.

    model: as for `prune_heads`, which can come before or after
    neurons_to_prune: `{layer: [neurons]}`, which leaves at least one in each layer; for CLIP `{"vision": {layer: [neurons]},
        "text": {layer: [neurons]}}`

    Fused by `from_pruned_members`, members that keep different neurons cannot share their MLPs: pass `shared` without "mlp".
    """
    return without_neurons(hydra_class(model), model, neurons_to_prune)


def check_count(number: int, name: str, least: int, most: int, why: str) -> None:
    """Refuses what is no whole number from `least` to `most`."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{name} is {number!r}: pass a whole number, {least} to {most}")
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}: {why}, so pass {least} to {most}")


def heads_of(model: PreTrainedModel, towers: Sequence[str] | None = None, trunk_layers: int = 0) -> list[Head]:
    """The heads that a one-member Hydra has, in order; of CLIP's towers only those in `towers`, and none of the first
    `trunk_layers` layers."""
    chosen = chosen_towers(model, towers)
    layers = min(config.num_hidden_layers for tower, config in tower_configs(model.config).items() if tower in chosen)
    check_count(
        trunk_layers, "trunk_layers", 0, layers - 1, f"there are {layers} layers, and heads behind it to prune"
    )
    return [
        head_at(tower, layer, head)
        for tower, config in tower_configs(model.config).items()
        if tower in chosen
        for layer, members in enumerate(config.kept_heads)
        if layer >= trunk_layers
        for head in members[0]
    ]


def has_two_towers(model: PreTrainedModel) -> bool:
    """Whether images and texts have a tower each, for zero-shot classification."""
    return len(tower_configs(encoder_config(model))) > 1


def chosen_towers(model: PreTrainedModel, towers: Sequence[str] | None) -> list[str]:
    """The names in `towers`, in order and checked; every tower where it is None. A model without towers has [""]."""
    existing = list(tower_configs(model.config))
    if towers is None:
        return existing
    if isinstance(towers, str):
        towers = [towers]
    if existing == [""]:
        raise ValueError(f"towers is {towers!r}: only CLIP and SigLIP have towers, leave the argument out")
    if not towers or not set(towers) <= set(existing):
        raise ValueError(f'towers is {towers!r}: pass some of "vision" and "text"')
    return [tower for tower in existing if tower in towers]


def attention_of(model: PreTrainedModel, tower: str, layer: int) -> nn.Module:
    """The fused attention of a Hydra's layer; `tower` is "" for a model without towers."""
    return model.get_submodule(attention_names(model)[tower][layer])


def head_at(tower: str, layer: int, head: int) -> Head:
    """A head by its name; `tower` is "" for a model without towers."""
    return (layer, head) if tower == "" else (tower, layer, head)


def tower_and_place(head: Head) -> tuple[str, int, int]:
    """(tower, layer, head), with "" for a model without towers."""
    return head if len(head) == 3 else ("", *head)


def as_heads_to_prune(heads: Iterable[Head]) -> dict:
    """Heads as `prune_heads` and `from_backbone` take them: `{layer: [heads]}`, for CLIP by tower."""
    by_tower: dict[str, dict[int, list[int]]] = {}
    for tower, layer, head in sorted(map(tower_and_place, heads), key=lambda place: (place[0] == "text", place)):
        by_tower.setdefault(tower, {}).setdefault(layer, []).append(head)
    return by_tower.get("", by_tower)


def as_heads(heads_to_prune: dict) -> list[Head]:
    """The heads that a `heads_to_prune` names."""
    heads: list[Head] = []
    for key, value in heads_to_prune.items():
        if isinstance(value, dict):
            heads += [(key, int(layer), head) for layer, of_layer in value.items() for head in of_layer]
        else:
            heads += [(int(key), head) for head in value]
    return heads
