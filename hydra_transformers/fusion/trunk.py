"""The trunk: leading layers that all members share, attention included, and that run once."""

from collections.abc import Mapping, Sequence
from numbers import Integral

from ..models.configuration_hydra import SHARED_PARTS, KeptHeads, TrunkLayers
from .structure import Member, attention_names, have_equal_tensors, outline, tower_configs


def trunk_depth(trunk_layers: int | float, layers: int) -> int:
    """Return how many of `layers` layers a trunk has: a count is taken as it is, a share is rounded
    down.

    Rounded down, a share never merges all layers, and members always have something of their own.

    >>> trunk_depth(0.75, 12), trunk_depth(0.75, 6), trunk_depth(9, 12)
    (9, 4, 9)
    """
    check_trunk_layers(trunk_layers)
    if isinstance(trunk_layers, float):
        return int(round(trunk_layers * layers, 6))  # 0.29 * 100 is 28.999999999999996
    return int(trunk_layers)


def check_trunk_layers(trunk_layers: int | float) -> None:
    """Raise for all but whole numbers and shares."""
    is_share = isinstance(trunk_layers, float) and 0 <= trunk_layers < 1
    is_count = isinstance(trunk_layers, Integral) and not isinstance(trunk_layers, bool)
    if not is_share and not is_count:
        raise ValueError(
            f"trunk_layers is {trunk_layers!r}: pass a share of the layers below 1, such as 0.75, or a whole number "
            "of layers"
        )


def resolve_trunk(
    cls: type, members: list[Member], shared: Sequence[str], trunk_layers: TrunkLayers
) -> dict[str, int]:
    """Return by tower how many leading layers members share: what `trunk_layers` says, or where it
    is None as many as are equal."""
    first_configs = tower_configs(members[0].config)
    towers = list(first_configs)

    # What was asked for.
    if isinstance(trunk_layers, Mapping):
        counts = dict(trunk_layers)
    else:
        counts = dict.fromkeys(towers, trunk_layers)
    for tower, number in counts.items():
        if tower not in towers:
            by_tower = ""
            if len(towers) > 1:
                by_tower = f", or {{{towers[0]!r}: ..., {towers[1]!r}: ...}}"
            raise ValueError(f"trunk_layers names {tower!r}: pass a number{by_tower}")
        if number is not None:
            counts[tower] = trunk_depth(number, len(first_configs[tower].kept_heads))
        if counts[tower]:
            _check_same_heads(members, tower, counts[tower])

    # Elsewhere the layers that are equal.
    depths = dict.fromkeys(towers, 0)
    shares_all = set(SHARED_PARTS) <= set(shared)
    is_open = any(counts.get(tower) is None for tower in towers)
    if len(members) > 1 and shares_all and is_open:
        depths = equal_layers(cls, members)
    given = {tower: count for tower, count in counts.items() if count is not None}
    return depths | given


def _check_same_heads(members: list[Member], tower: str, count: int) -> None:
    """Raise where members keep different heads in one of the first `count` layers."""
    first, *others = [tower_configs(member.config)[tower].kept_heads for member in members]
    where = f" of the {tower} tower" if tower else ""
    for layer in range(min(count, len(first))):
        for member, kept in zip(members[1:], others, strict=True):
            if kept[layer] != first[layer]:
                raise ValueError(
                    f"trunk_layers is {count}, and in layer {layer}{where} {member.name} keeps the heads "
                    f"{kept[layer][0]}, {members[0].name} keeps {first[layer][0]}: pass members with the same heads "
                    f"there, or at most {layer}"
                )


def equal_layers(cls: type, members: list[Member]) -> dict[str, int]:
    """Return by tower how many leading layers have the same heads and bit for bit the same weights
    in all members; none where something before the first layer differs."""
    dense = outline(cls, members[0].config)
    names = [name for name, _ in dense.named_parameters()]
    depths = {}
    for tower, attentions in attention_names(dense).items():
        layers = [name.removesuffix("attention") for name in attentions]
        kept_heads = [tower_configs(member.config)[tower].kept_heads for member in members]
        depths[tower] = _count_equal_layers(members, names, layers, kept_heads)
    return depths


def _count_equal_layers(
    members: list[Member], names: list[str], layers: list[str], kept_heads: list[KeptHeads]
) -> int:
    """Return how many leading layers of a tower are equal.

    names: of all parameters, in order
    layers: the prefixes of the tower's layers
    kept_heads: of each member in this tower
    """
    # What comes before the layers.
    encoder = layers[0].removesuffix("layers.0.")
    is_in_first_layer = [name.startswith(layers[0]) for name in names]
    start = is_in_first_layer.index(True)
    before = [name for name in names[:start] if name.startswith(encoder)]
    if not have_equal_tensors(members, before):
        return 0

    for index, layer in enumerate(layers):
        has_same_heads = all(heads[index] == kept_heads[0][index] for heads in kept_heads)
        in_layer = [name for name in names if name.startswith(layer)]
        if not has_same_heads or not have_equal_tensors(members, in_layer):
            return index
    return len(layers)
