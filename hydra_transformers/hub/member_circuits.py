"""Circuits of members: read from a folder, and matched with the members that lost those heads."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from .._io.files import written_whole
from ..fusion import tower_configs
from ..pruning import Circuit
from ..pruning.heads import Head, heads_in
from ..pruning.member_plan import CIRCUITS
from ..pruning.objectives import OBJECTIVES


def kept_by(config: PreTrainedConfig, member: int = 0) -> set[Head]:
    """The heads that a member of a Hydra keeps."""
    return set(heads_in(config.kept_heads, member))


def heads_of_backbone(config: PreTrainedConfig) -> set[Head]:
    """All heads that the backbone of a Hydra had, as Transformers built it."""
    every = {
        tower: [[list(range(tower_config.num_attention_heads))]] * tower_config.num_hidden_layers
        for tower, tower_config in tower_configs(config).items()
    }
    return set(heads_in(every))


def lost_by(circuit: Circuit, kept: set[Head], every: set[Head]) -> set[Head]:
    """The heads that a member lost since the circuit was extracted, from a model that may have been pruned before."""
    before = circuit.made_from.get("kept_heads")
    return (every if before is None else set(heads_in(before))) - kept


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


# Files


def load_circuits(folder: str | os.PathLike, configs: Sequence[PreTrainedConfig]) -> list[Circuit] | None:
    """The circuits in the folder of a model or of members, in the order of the members; None where there are none.

    configs: that of the Hydra, or of every member
    """
    place = Path(folder) / CIRCUITS
    hydras = [config for config in configs if hasattr(config, "num_members")]
    members = [kept_by(config, member) for config in hydras for member in range(config.num_members)]
    if any(place.glob("member-*.json")):  # of members that come from several backbones: each has its own
        paths = [place / f"member-{index}.json" for index in range(len(members))]
        if set(paths) == set(place.glob("member-*.json")):
            circuits, every = [Circuit.load(path) for path in paths], heads_of_backbone(configs[0])
            if all(has_led_to(circuit, kept, every) for circuit, kept in zip(circuits, members, strict=True)):
                return circuits
        raise _not_theirs(place)
    paths = [place / f"{objective}.json" for objective in OBJECTIVES]
    circuits = [_load(path) for path in paths if path.exists()]
    if not circuits:
        return None
    ordered = in_order_of_members(circuits, members, heads_of_backbone(configs[0]))
    if ordered is None:
        raise _not_theirs(place)
    return ordered


def _load(path: Path) -> Circuit:
    circuit = Circuit.load(path)
    if circuit.objective != path.stem:
        raise ValueError(
            f"{path} is a circuit for {circuit.objective!r}, not for {path.stem!r}: put the right one back"
        )
    return circuit


def _not_theirs(folder: Path) -> ValueError:
    return ValueError(
        f"the circuits in {folder} are not those by which these members lost their heads: remove them, or run "
        "`hydra-transformers prune` again"
    )


def copy_circuits(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copies the circuits from one folder to another that has none; checkpoints of an extraction stay behind."""
    circuits, place = sorted((Path(source) / CIRCUITS).glob("*.json")), Path(target) / CIRCUITS
    if circuits and not place.exists():
        with written_whole(place) as folder:
            for path in circuits:
                shutil.copy(path, folder)
