"""The heads that members keep, as text, and the circuits by which they lost the others."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from .._io.files import written_whole
from ..fusion import number_of_layers, tower_configs
from ..pruning import Circuit
from ..pruning.heads import Head, heads_in
from ..pruning.member_plan import CIRCUITS
from ..pruning.objectives import OBJECTIVES


KEPT, PRUNED = "■", "·"


def kept_heads_map(config: PreTrainedConfig) -> str:
    """One line per layer, one column per member, one sign per head of the backbone (■ kept, · pruned), and how many.

    Example:
        >>> from hydra_transformers import HydraViTConfig
        >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
        >>> print(kept_heads_map(HydraViTConfig(kept_heads=[[[0, 1], [3]], [[], [0, 1, 2, 3]]], **sizes)))
                   member 0  member 1
        layer 0    ■■··  2   ···■  1
        layer 1    ····  0   ■■■■  4
        kept of 8  2         5

    A last line says how many layers run once for all members, if any do.
    """
    maps = {tower: _map_of_tower(each) for tower, each in tower_configs(config).items()}
    return "\n\n".join(f"{tower} tower\n{text}" if tower else text for tower, text in maps.items())


def _map_of_tower(config: PreTrainedConfig) -> str:
    heads, layers = config.num_attention_heads, len(config.kept_heads)
    columns = [["", *(f"layer {layer}" for layer in range(layers)), f"kept of {heads * layers}"]]
    for member in range(config.num_members):
        kept = [layer[member] for layer in config.kept_heads]
        signs = ["".join(KEPT if head in layer else PRUNED for head in range(heads)) for layer in kept]
        lines = [f"{sign}  {len(layer)}" for sign, layer in zip(signs, kept, strict=True)]
        columns.append([f"member {member}", *lines, str(sum(map(len, kept)))])
    widths = [max(map(len, column)) for column in columns]
    rows = zip(*columns, strict=True)
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines += [_first_layers(config)] if config.trunk_layers else []
    return "\n".join(lines)


def trunk_sentence(config: PreTrainedConfig) -> str:
    """ "the first 6 layers run once for all members", for CLIP by tower; empty where no layer does."""
    towers = {tower: each for tower, each in tower_configs(config).items() if each.trunk_layers}
    return "; ".join(
        (f"in the {tower} tower " if tower else "") + _first_layers(each) for tower, each in towers.items()
    )


def _first_layers(config: PreTrainedConfig) -> str:
    trunk = config.trunk_layers
    return f"the first {f'{trunk} layers run' if trunk > 1 else 'layer runs'} once for all members"


# Circuits


def kept_by(config: PreTrainedConfig, member: int = 0) -> set[Head]:
    """The heads that a member of a Hydra keeps."""
    return set(heads_in(config.kept_heads, member))


def heads_of_backbone(config: PreTrainedConfig) -> set[Head]:
    """All heads of a Hydra's backbone before any pruning."""
    towers = tower_configs(config).items()
    every = {tower: [[range(each.num_attention_heads)]] * number_of_layers(each) for tower, each in towers}
    return set(heads_in(every))


def lost_by(circuit: Circuit, kept: set[Head], every: set[Head]) -> set[Head]:
    """The heads that a member lost since the circuit was extracted, from a model that may have been pruned before."""
    before = circuit.made_from.get("kept_heads")
    return (every if before is None else set(heads_in(before))) - kept


def has_led_to(circuit: Circuit, kept: set[Head], every: set[Head]) -> bool:
    """Whether the first heads of a circuit are those that a member lost."""
    lost = lost_by(circuit, kept, every)
    return len(circuit.scores) >= len(lost) and set(circuit.ranking[: len(lost)]) == lost


def _matched(circuits: Sequence[Circuit], members: Sequence[set[Head]], every: set[Head]) -> list[Circuit] | None:
    """The circuits in the order of the members they led to, or the one that all members were sampled from; None if they
    led to other members."""
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


def load_circuits(folder: str | os.PathLike, configs: Sequence[PreTrainedConfig]) -> list[Circuit] | None:
    """The circuits in the folder of a model or of members, in the order of the members; None where there are none.

    configs: that of the Hydra, or of every member
    """
    place, every = Path(folder) / CIRCUITS, heads_of_backbone(configs[0])
    hydras = [config for config in configs if hasattr(config, "num_members")]
    members = [kept_by(config, member) for config in hydras for member in range(config.num_members)]
    found = None
    if own := set(place.glob("member-*.json")):  # members from several backbones have one each, in their order
        paths = [place / f"member-{index}.json" for index in range(len(members))]
        circuits = [Circuit.load(path) for path in paths] if own == set(paths) else []
        if circuits and all(has_led_to(each, kept, every) for each, kept in zip(circuits, members, strict=True)):
            found = circuits
    else:
        circuits = [_load(path) for path in (place / f"{each}.json" for each in OBJECTIVES) if path.exists()]
        if not circuits:
            return None
        found = _matched(circuits, members, every)
    if found is None:
        raise ValueError(
            f"the circuits in {place} are not those by which these members lost their heads: remove them, or run "
            "`hydra-transformers prune` again"
        )
    return found


def _load(path: Path) -> Circuit:
    circuit = Circuit.load(path)
    if circuit.objective != path.stem:
        raise ValueError(
            f"{path} is a circuit for {circuit.objective!r}, not for {path.stem!r}: put the right one back"
        )
    return circuit


def copy_circuits(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copies the circuits, without checkpoints of an extraction, from one folder to another that has none."""
    circuits, place = sorted((Path(source) / CIRCUITS).glob("*.json")), Path(target) / CIRCUITS
    if circuits and not place.exists():
        with written_whole(place) as folder:
            for path in circuits:
                shutil.copy(path, folder)
