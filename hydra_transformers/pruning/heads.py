"""Attention heads by number: cutting them out of a model, and writing sets of them.

A head is `(layer, head)`, for CLIP `(tower, layer, head)`, numbered as in the backbone. Heads are
ordered by tower ("vision" before "text"), then layer, then head. Ties go to the first in this
order.
"""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TYPE_CHECKING

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fusion.structure import attention_names, tower_configs
from ..fusion.trunk import trunk_depth
from ..models.auto import AutoHydra


if TYPE_CHECKING:
    from ..models.auto import HydraModel


Head = tuple[int, int] | tuple[str, int, int]
Towers = Sequence[str]  # some of "vision" and "text"
Prompts = Mapping[str, Tensor]  # the tokenizer's output with one row per class, for CLIP and SigLIP


def prune_heads(model: PreTrainedModel, heads_to_prune: dict | None = None) -> "HydraModel":
    """Return a one-member Hydra of `model` without `heads_to_prune`; `model` stays as it is.

    Args:
        model (`PreTrainedModel`): of Transformers (`AutoHydra.supported()` lists them), or a
            one-member Hydra to prune further.
        heads_to_prune (`dict`, *optional*): `{layer: [heads]}`; for CLIP
            `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`.
    """
    return AutoHydra.from_backbone(model, heads_to_prune)


def check_count(number: int, name: str, least: int, most: int, why: str) -> None:
    """Accept whole numbers from `least` to `most` only."""
    if isinstance(number, bool) or not isinstance(number, Integral):
        raise TypeError(f"{name} is {number!r}: pass a whole number, {least} to {most}")
    if not least <= number <= most:
        raise ValueError(f"{name} is {number}: {why}, so pass {least} to {most}")


def heads_of(model: PreTrainedModel, towers: Towers | None = None, trunk_layers: int | float = 0) -> list[Head]:
    """Return the heads of a one-member Hydra in order, without those of the trunk.

    For CLIP these are the heads of `towers`.
    """
    configs = {tower: tower_configs(model.config)[tower] for tower in chosen_towers(model, towers)}
    kept_heads = {tower: config.kept_heads for tower, config in configs.items()}

    # The trunk: as many first layers in each tower.
    fewest_layers = min(len(layers) for layers in kept_heads.values())
    depths = {tower: trunk_depth(trunk_layers, len(layers)) for tower, layers in kept_heads.items()}
    if not isinstance(trunk_layers, float):
        why = f"there are {fewest_layers} layers, and some must be left to prune"
        check_count(trunk_layers, "trunk_layers", 0, fewest_layers - 1, why)

    heads = []
    for head in heads_in(kept_heads):
        tower, layer, _ = tower_and_place(head)
        if layer >= depths[tower]:
            heads.append(head)
    return heads


def heads_in(kept_heads: list | Mapping[str, list], member: int = 0) -> list[Head]:
    """Return the heads of a member in a config's `kept_heads`, for CLIP by tower.

    A tower with a single member serves all.
    """
    by_tower = kept_heads
    if not isinstance(kept_heads, Mapping):
        by_tower = {"": kept_heads}
    heads = []
    for tower, layers in by_tower.items():
        for layer, members in enumerate(layers):
            last = len(members) - 1
            for head in members[min(member, last)]:
                heads.append((layer, head) if tower == "" else (tower, layer, head))
    return heads


def chosen_towers(model: PreTrainedModel, towers: Towers | None) -> list[str]:
    """Return the names in `towers`, checked and in order; None stands for all.

    The name is "" in a model without towers.
    """
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
    """Return the fused attention of a Hydra's layer; `tower` is "" in a model without towers."""
    names = attention_names(model)[tower]
    return model.get_submodule(names[layer])


def tower_and_place(head: Head) -> tuple[str, int, int]:
    """Return (tower, layer, head), with "" for a model without towers."""
    if len(head) == 3:
        return head
    return ("", *head)


def as_heads_to_prune(heads: Iterable[Head]) -> dict:
    """Return heads as `prune_heads` takes them: `{layer: [heads]}`, for CLIP by tower."""

    def vision_first(place: tuple[str, int, int]) -> tuple:
        return place[0] == "text", place

    by_tower: dict[str, dict[int, list[int]]] = {}
    for tower, layer, head in sorted(map(tower_and_place, heads), key=vision_first):
        layers = by_tower.setdefault(tower, {})
        layers.setdefault(layer, []).append(head)
    return by_tower.get("", by_tower)
