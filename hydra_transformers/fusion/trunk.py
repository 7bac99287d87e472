"""The trunk: leading layers that are one for all members, and run once."""

from collections.abc import Mapping, Sequence

import torch

from ..models.configuration_hydra import SHARED_PARTS, TrunkLayers
from .reading import Member
from .structure import attention_names, tower_configs, without_weights


def trunks_of(cls: type, members: list[Member], shared: Sequence[str], trunk_layers: TrunkLayers) -> dict[str, int]:
    """By tower, how many leading layers members have in common: as many as `trunk_layers` says for it, or where it says
    nothing as many as are equal already."""
    towers = tower_configs(members[0].config)
    wanted = _by_tower(trunk_layers, list(towers))
    for tower, count in wanted.items():
        if count:
            _check_same_heads(members, tower, count)
    is_detected = len(members) > 1 and set(SHARED_PARTS) <= set(shared)
    found = equal_layers(cls, members) if is_detected and None in wanted.values() else dict.fromkeys(towers, 0)
    return {tower: found[tower] if count is None else count for tower, count in wanted.items()}


def _by_tower(trunk_layers: TrunkLayers, towers: list[str]) -> dict[str, int | None]:
    given = trunk_layers if isinstance(trunk_layers, Mapping) else dict.fromkeys(towers, trunk_layers)
    for tower, count in given.items():
        if tower not in towers:
            of_towers = f"a number, or {{{towers[0]!r}: ..., {towers[1]!r}: ...}}" if len(towers) > 1 else "a number"
            raise ValueError(f"trunk_layers names {tower!r}: pass {of_towers}")
        if count is not None and type(count) is not int:
            raise TypeError(f"trunk_layers is {trunk_layers!r}: pass a number of layers, or None to find equal ones")
    return {tower: given.get(tower) for tower in towers}


def _check_same_heads(members: list[Member], tower: str, count: int) -> None:
    first, *others = (tower_configs(member.config)[tower].kept_heads for member in members)
    where = f" of the {tower} tower" if tower else ""
    for layer in range(min(count, len(first))):
        for member, kept in zip(members[1:], others, strict=True):
            if kept[layer] != first[layer]:
                raise ValueError(
                    f"trunk_layers is {count}, and in layer {layer}{where} {member.name} keeps the heads {kept[layer][0]}, "
                    f"{members[0].name} keeps {first[layer][0]}: pass members with the same heads there, or at most {layer}"
                )


def equal_layers(cls: type, members: list[Member]) -> dict[str, int]:
    """By tower, how many leading layers have the same heads and bit for bit the same weights in all members, where these
    also agree on what comes before the first layer."""
    first, *others = members
    dense = without_weights(cls, first.config)
    names = [name for name, _ in dense.named_parameters()]

    def are_equal(of_part: list[str]) -> bool:
        return all(
            torch.equal(other.tensors[name].to(first.tensors[name].device), first.tensors[name])
            for name in of_part
            for other in others
        )

    def count(tower: str, attentions: list[str]) -> int:
        layers = [name.removesuffix("attention") for name in attentions]
        encoder = layers[0].removesuffix("layers.0.")
        start = next(place for place, name in enumerate(names) if name.startswith(layers[0]))
        if not are_equal([name for name in names[:start] if name.startswith(encoder)]):
            return 0
        kept = [tower_configs(member.config)[tower].kept_heads for member in members]
        for index, layer in enumerate(layers):
            has_same_heads = all(of_member[index] == kept[0][index] for of_member in kept)
            if not has_same_heads or not are_equal([name for name in names if name.startswith(layer)]):
                return index
        return len(layers)

    return {tower: count(tower, attentions) for tower, attentions in attention_names(dense).items()}
