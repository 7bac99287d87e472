"""The trunk: leading layers that all members share, attention included, and that run once."""

from collections.abc import Mapping, Sequence
from numbers import Integral

from ..models.configuration_hydra import SHARED_PARTS, TrunkLayers
from .structure import Member, attention_names, have_equal_tensors, outline, tower_configs


def trunk_depth(trunk_layers: int | float, layers: int) -> int:
    """How many of `layers` layers a trunk has: a count is taken as it is, a share is rounded down.

    Rounded down, a share never merges all layers, and members always have something of their own.

    >>> trunk_depth(0.75, 12), trunk_depth(0.75, 6), trunk_depth(9, 12)
    (9, 4, 9)
    """
    check_trunk_layers(trunk_layers)
    if isinstance(trunk_layers, float):
        return int(round(trunk_layers * layers, 6))  # 0.29 * 100 is 28.999999999999996
    return int(trunk_layers)


def check_trunk_layers(trunk_layers: int | float) -> None:
    """Raises for all but whole numbers and shares."""
    is_share = isinstance(trunk_layers, float) and 0 <= trunk_layers < 1
    if not is_share and (isinstance(trunk_layers, bool) or not isinstance(trunk_layers, Integral)):
        raise ValueError(
            f"trunk_layers is {trunk_layers!r}: pass a share of the layers below 1, such as 0.75, or a whole number of layers"
        )


def resolve_trunk(
    cls: type, members: list[Member], shared: Sequence[str], trunk_layers: TrunkLayers
) -> dict[str, int]:
    """By tower, how many leading layers members share: what `trunk_layers` says, or where it is None as many as are equal."""
    towers = list(tower_configs(members[0].config))
    counts = dict(trunk_layers) if isinstance(trunk_layers, Mapping) else dict.fromkeys(towers, trunk_layers)
    for tower, number in counts.items():
        if tower not in towers:
            by_tower = f", or {{{towers[0]!r}: ..., {towers[1]!r}: ...}}" if len(towers) > 1 else ""
            raise ValueError(f"trunk_layers names {tower!r}: pass a number{by_tower}")
        if number is not None:
            counts[tower] = trunk_depth(number, len(tower_configs(members[0].config)[tower].kept_heads))
        if counts[tower]:
            _check_same_heads(members, tower, counts[tower])
    depths = dict.fromkeys(towers, 0)
    if len(members) > 1 and set(SHARED_PARTS) <= set(shared) and any(counts.get(tower) is None for tower in towers):
        depths = equal_layers(cls, members)
    return depths | {tower: count for tower, count in counts.items() if count is not None}


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
    """By tower, how many leading layers have the same heads and bit for bit the same weights in all members; none where
    something before the first layer differs."""
    dense = outline(cls, members[0].config)
    names = [name for name, _ in dense.named_parameters()]

    def depth(tower: str, attentions: list[str]) -> int:
        layers = [name.removesuffix("attention") for name in attentions]
        encoder = layers[0].removesuffix("layers.0.")
        start = next(place for place, name in enumerate(names) if name.startswith(layers[0]))
        if not have_equal_tensors(members, [name for name in names[:start] if name.startswith(encoder)]):
            return 0
        kept = [tower_configs(member.config)[tower].kept_heads for member in members]
        for index, layer in enumerate(layers):
            has_same_heads = all(heads[index] == kept[0][index] for heads in kept)
            if not has_same_heads or not have_equal_tensors(members, [n for n in names if n.startswith(layer)]):
                return index
        return len(layers)

    return {tower: depth(tower, attentions) for tower, attentions in attention_names(dense).items()}
