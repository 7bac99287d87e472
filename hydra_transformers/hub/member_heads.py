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


KEPT, PRUNED = "■", "·"


def kept_heads_map(config: PreTrainedConfig) -> str:
    """One line per layer, one column per member, one sign per head of the backbone (■ kept, · pruned), and how many.

    Args:
        config (`PreTrainedConfig`): of a Hydra.

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
    maps = {tower: _map_of_tower(part) for tower, part in tower_configs(config).items()}
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
    return "\n".join(filter(None, [*lines, trunk_sentence(config)]))


def trunk_sentence(config: PreTrainedConfig) -> str:
    """ "the first 6 layers run once for all members", for CLIP by tower; empty where no layer does."""
    towers = {tower: part.trunk_layers for tower, part in tower_configs(config).items() if part.trunk_layers}
    return "; ".join(
        f"{f'in the {tower} tower ' if tower else ''}the first {f'{trunk} layers run' if trunk > 1 else 'layer runs'} once for all "
        "members"
        for tower, trunk in towers.items()
    )


def heads_of_backbone(config: PreTrainedConfig) -> set[Head]:
    """All heads of a Hydra's backbone before any pruning."""
    towers = tower_configs(config).items()
    return set(heads_in({name: [[range(t.num_attention_heads)]] * number_of_layers(t) for name, t in towers}))


def pruned_heads(circuit: Circuit, config: PreTrainedConfig, member: int) -> set[Head]:
    """The heads that a member lost since the circuit was extracted, from a model that may have been pruned before."""
    before = circuit.made_from.get("kept_heads")
    heads = heads_of_backbone(config) if before is None else set(heads_in(before))
    return heads - set(heads_in(config.kept_heads, member))


def matches_circuit(circuit: Circuit, config: PreTrainedConfig, member: int) -> bool:
    """Whether the first heads of a circuit are those that a member lost."""
    pruned = pruned_heads(circuit, config, member)
    return len(circuit.scores) >= len(pruned) and set(circuit.ranking[: len(pruned)]) == pruned


def load_circuits(folder: str | os.PathLike, configs: Sequence[PreTrainedConfig]) -> list[Circuit] | None:
    """The circuits of a folder: one per member, in their order, or one that all were sampled from; None where there are none.

    configs: that of the Hydra, or of every member
    """
    left = [Circuit.load(path) for path in sorted((Path(folder) / FOLDER).glob("*.json"))]
    members = [(config, member) for config in configs for member in range(getattr(config, "num_members", 0))]
    if len(left) == 1 and all(pruned_heads(left[0], *member) <= set(left[0].ranking) for member in members):
        return left
    ordered = []
    for member in members if left else ():
        circuit = next((circuit for circuit in left if matches_circuit(circuit, *member)), None)
        if circuit is None:
            break
        ordered.append(left.pop(left.index(circuit)))
    if left or 0 < len(ordered) < len(members):
        raise ValueError(
            f"the circuits in {Path(folder) / FOLDER} are not those by which these members lost their heads: remove them, or "
            "run `hydra-transformers prune` again"
        )
    return ordered or None


def copy_circuits(source: str | os.PathLike, target: str | os.PathLike) -> None:
    """Copies the circuits, without checkpoints of an extraction, from one folder to another that has none."""
    circuits, place = sorted((Path(source) / FOLDER).glob("*.json")), Path(target) / FOLDER
    if circuits and not place.exists():
        with written_whole(place) as folder:
            for path in circuits:
                shutil.copy(path, folder)
