"""The heads that members keep, as text, and the circuits by which they lost the others."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedConfig

from .._io.files import written_whole
from ..fusion.structure import number_of_layers, tower_configs
from ..pruning import Circuit
from ..pruning.circuits import FOLDER
from ..pruning.heads import Head, heads_in


KEPT = "■"
PRUNED = "·"


def kept_heads_map(config: PreTrainedConfig) -> str:
    """Draw which heads of the backbone each member keeps.

    There is one line per layer, one column per member, and one sign per head (■ kept, · pruned),
    with their number.

    Args:
        config (`PreTrainedConfig`): of a Hydra.

    Example:
        >>> from hydra_transformers import HydraViTConfig
        >>> sizes = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}
        >>> kept_heads = [[[0, 1], [3]], [[], [0, 1, 2, 3]]]
        >>> print(kept_heads_map(HydraViTConfig(kept_heads=kept_heads, **sizes)))
                   member 0  member 1
        layer 0    ■■··  2   ···■  1
        layer 1    ····  0   ■■■■  4
        kept of 8  2         5

    A last line says how many layers run once for all members, if any do.
    """
    maps = []
    for tower, part in tower_configs(config).items():
        text = _map_of_tower(part)
        if tower:
            text = f"{tower} tower\n{text}"
        maps.append(text)
    return "\n\n".join(maps)


def _map_of_tower(config: PreTrainedConfig) -> str:
    """Draw the heads of one tower."""
    heads = config.num_attention_heads
    layers = len(config.kept_heads)

    # The columns: the names of the layers, then each member's heads, and how many these are.
    names = [f"layer {layer}" for layer in range(layers)]
    columns = [["", *names, f"kept of {heads * layers}"]]
    for member in range(config.num_members):
        cells = []
        total = 0
        for layer in config.kept_heads:
            kept = layer[member]
            total += len(kept)
            signs = "".join(KEPT if head in kept else PRUNED for head in range(heads))
            cells.append(f"{signs}  {len(kept)}")
        columns.append([f"member {member}", *cells, str(total)])

    # Each as wide as its longest cell.
    padded = []
    for column in columns:
        width = max(map(len, column))
        padded.append([cell.ljust(width) for cell in column])
    lines = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
    trunk = trunk_sentence(config)
    if trunk:
        lines.append(trunk)
    return "\n".join(lines)


def trunk_sentence(config: PreTrainedConfig) -> str:
    """Say how many layers run once for all members; nothing where none does.

    "the first 6 layers run once for all members", for CLIP by tower
    """
    sentences = []
    for tower, part in tower_configs(config).items():
        trunk = part.trunk_layers
        if not trunk:
            continue
        place = f"in the {tower} tower " if tower else ""
        layers = f"{trunk} layers run" if trunk > 1 else "layer runs"
        sentences.append(f"{place}the first {layers} once for all members")
    return "; ".join(sentences)


def heads_of_backbone(config: PreTrainedConfig) -> set[Head]:
    """Return all heads of a Hydra's backbone before any pruning."""
    kept_heads = {}
    for tower, part in tower_configs(config).items():
        all_heads = range(part.num_attention_heads)
        kept_heads[tower] = [[all_heads]] * number_of_layers(part)
    return set(heads_in(kept_heads))


def pruned_heads(circuit: Circuit, config: PreTrainedConfig, member: int) -> set[Head]:
    """Return the heads that a member lost since the circuit was extracted.

    The circuit's model may have been pruned before.
    """
    before = circuit.made_from.get("kept_heads")
    if before is None:
        heads = heads_of_backbone(config)
    else:
        heads = set(heads_in(before))
    return heads - set(heads_in(config.kept_heads, member))


def matches_circuit(circuit: Circuit, config: PreTrainedConfig, member: int) -> bool:
    """Whether the first heads of a circuit are those that a member lost."""
    pruned = pruned_heads(circuit, config, member)
    return len(circuit.scores) >= len(pruned) and set(circuit.ranking[: len(pruned)]) == pruned


def load_circuits(folder: str | os.PathLike, configs: Sequence[PreTrainedConfig]) -> list[Circuit] | None:
    """Return the circuits of a folder; None where there are none.

    They are one per member, in their order, or one that all members' heads were sampled from.

    configs: that of the Hydra, or of every member
    """
    place = Path(folder) / FOLDER
    circuits = [Circuit.load(path) for path in sorted(place.glob("*.json"))]
    if not circuits:
        return None
    members = []
    for config in configs:
        members += [(config, member) for member in range(getattr(config, "num_members", 0))]

    # One for all.
    if len(circuits) == 1:
        ranking = set(circuits[0].ranking)
        if all(pruned_heads(circuits[0], *member) <= ranking for member in members):
            return circuits

    # One for each, in the order of the members.
    left = list(circuits)
    ordered = []
    for member in members:
        matching = [circuit for circuit in left if matches_circuit(circuit, *member)]
        if not matching:
            break
        ordered.append(matching[0])
        left.remove(matching[0])
    if left or len(ordered) < len(members):
        raise ValueError(
            f"the circuits in {place} are not those by which these members lost their heads: remove them, or run "
            "`hydra-transformers prune` again"
        )
    return ordered


def copy_circuits(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copy the circuits of a folder into another that has none.

    Checkpoints of an unfinished extraction stay behind.
    """
    circuits = sorted((Path(source) / FOLDER).glob("*.json"))
    place = Path(target) / FOLDER
    if circuits and not place.exists():
        with written_whole(place) as folder:
            for path in circuits:
                shutil.copy(path, folder)
