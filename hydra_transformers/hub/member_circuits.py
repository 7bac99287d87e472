"""Which circuit led to which member: told by the heads the member lost."""

from collections.abc import Mapping, Sequence

from transformers import PreTrainedConfig

from ..fusion import tower_configs
from ..pruning import Circuit
from ..pruning.heads import Head, head_at


def kept_by(config: PreTrainedConfig, member: int = 0) -> set[Head]:
    """The heads that a member of a Hydra keeps."""
    return _named(config.kept_heads, member)


def heads_of_backbone(config: PreTrainedConfig) -> set[Head]:
    """All heads that the backbone of a Hydra had, as Transformers built it."""
    every = {
        tower: [[list(range(tower_config.num_attention_heads))]] * tower_config.num_hidden_layers
        for tower, tower_config in tower_configs(config).items()
    }
    return _named(every, 0)


def lost_by(circuit: Circuit, kept: set[Head], every: set[Head]) -> set[Head]:
    """The heads that a member lost since the circuit was extracted, from a model that may have been pruned before."""
    before = circuit.made_from.get("kept_heads")
    return (every if before is None else _named(before, 0)) - kept


def has_led_to(circuit: Circuit, kept: set[Head], every: set[Head]) -> bool:
    """Whether the first heads of a circuit are those that a member lost."""
    lost = lost_by(circuit, kept, every)
    return len(circuit.scores) >= len(lost) and set(circuit.ranking[: len(lost)]) == lost


def in_order_of_members(
    circuits: Sequence[Circuit], members: Sequence[set[Head]], every: set[Head]
) -> list[Circuit] | None:
    """The circuits in the order of the members that they led to, or the one from which all members were sampled; None
    where they led to other members.

    members: the heads that each keeps
    """
    if len(circuits) == 1:
        ranked = set(circuits[0].ranking)
        return list(circuits) if all(lost_by(circuits[0], kept, every) <= ranked for kept in members) else None
    left, ordered = list(circuits), []
    for kept in members:
        place = next((place for place, each in enumerate(left) if has_led_to(each, kept, every)), None)
        if place is None:
            return None
        ordered.append(left.pop(place))
    return None if left else ordered


def _named(kept_heads: Sequence | Mapping[str, Sequence], member: int) -> set[Head]:
    """`kept_heads[layer][member]`, for CLIP by tower, as heads; a tower with a single member serves all."""
    towers = kept_heads if isinstance(kept_heads, Mapping) else {"": kept_heads}
    return {
        head_at(tower, layer, head)
        for tower, layers in towers.items()
        for layer, members in enumerate(layers)
        for head in members[min(member, len(members) - 1)]
    }
