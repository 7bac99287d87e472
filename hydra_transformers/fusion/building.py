"""Members with fewer heads, and models that hold members."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.configuration_hydra import SHARED_PARTS
from .reading import Member
from .structure import Slot, attention_names, hydra_config, outline, slots, tower_configs


def prune(cls: type, member: Member, heads_to_prune: dict | None) -> Member:
    """The member with heads cut out: q, k, v and o lose the heads' rows, the config their numbers."""
    tensors, kept = dict(member.tensors), {}
    empty = outline(cls, member.config)
    before = {
        tower: [layer[0] for layer in config.kept_heads] for tower, config in tower_configs(member.config).items()
    }
    after = remaining_heads(before, heads_to_prune)
    for tower, names in attention_names(empty).items():
        kept[tower] = [[heads] for heads in after[tower]]
        for layer, name in enumerate(names):
            heads = before[tower][layer]
            if after[tower][layer] != heads:
                positions = [heads.index(head) for head in after[tower][layer]]
                _keep_heads(tensors, name, positions, empty.get_submodule(name).head_dim)
    return Member(member.name, hydra_config(cls.config_class, member.config, kept, SHARED_PARTS), tensors)


def remaining_heads(kept: dict[str, list[list[int]]], heads_to_prune: dict | None) -> dict[str, list[list[int]]]:
    """Heads that are left per tower and layer once `heads_to_prune` (`{layer: [heads]}`, of two towers by tower) are gone
    from `kept`; `{"": ...}` where there are no towers."""
    by_tower = _by_tower(list(kept), heads_to_prune or {})
    return {tower: keep_after_pruning(layers, by_tower.get(tower)) for tower, layers in kept.items()}


def _by_tower(towers: list[str], heads_to_prune: dict) -> dict[str, dict]:
    if towers == [""]:
        return {"": heads_to_prune}
    if not isinstance(heads_to_prune, dict):
        raise TypeError(
            f"heads_to_prune is a {type(heads_to_prune).__name__}: pass {{'vision': {{...}}, 'text': {{...}}}}"
        )
    for tower in heads_to_prune:
        if tower not in towers:
            raise ValueError(f"heads_to_prune names {tower!r}: pass {{'vision': {{...}}, 'text': {{...}}}}")
    return heads_to_prune


def keep_after_pruning(kept: list[list[int]], heads_to_prune: dict[int, list[int]] | None) -> list[list[int]]:
    """Heads that one member keeps per layer once `heads_to_prune` (`{layer: [heads]}`) are gone from `kept`."""
    if not isinstance(heads_to_prune, dict | None):
        raise TypeError(f"heads_to_prune is a {type(heads_to_prune).__name__}: pass one member's, {{layer: [heads]}}")
    for layer, heads in (heads_to_prune or {}).items():
        if not str(layer).lstrip("-").isdigit():
            raise ValueError(f"heads_to_prune names {layer!r}: pass {{layer: [heads]}}, layers by their numbers")
        if isinstance(heads, (int, str)):
            raise ValueError(f"heads_to_prune[{layer}] is {heads!r}: pass a list of heads")
    heads_to_prune = {int(layer): list(heads) for layer, heads in (heads_to_prune or {}).items()}
    for layer, heads in heads_to_prune.items():
        if not 0 <= layer < len(kept):
            raise ValueError(f"heads_to_prune names layer {layer}: the model has layers 0 to {len(kept) - 1}")
        for head in heads:
            if head not in kept[layer]:
                raise ValueError(
                    f"heads_to_prune[{layer}] names head {head!r}: the model has the heads {kept[layer]} in this layer"
                )
    return [[head for head in heads if head not in heads_to_prune.get(layer, [])] for layer, heads in enumerate(kept)]


def _keep_heads(tensors: dict[str, torch.Tensor], attention: str, positions: list[int], head_dim: int) -> None:
    """Leaves only the heads at `positions` of one attention's packed tensors."""
    for parameter in ("qkv_proj.weight", "qkv_proj.bias"):
        if f"{attention}.{parameter}" in tensors:
            tensors[f"{attention}.{parameter}"] = heads_at(tensors[f"{attention}.{parameter}"], positions, head_dim, 3)
    tensors[f"{attention}.o_proj.weight"] = heads_at(tensors[f"{attention}.o_proj.weight"], positions, head_dim)


def heads_at(tensor: torch.Tensor, positions: Sequence[int], head_dim: int, projections: int = 1) -> torch.Tensor:
    """The rows of the heads at `positions`, of each projection: (projections * heads * head_dim, ...)"""
    index = torch.tensor(positions, dtype=torch.long, device=tensor.device)
    return tensor.unflatten(0, (projections, -1, head_dim)).index_select(1, index).flatten(0, 2)


def build(
    cls: type, members: list[Member], shared: Sequence[str], trunks: dict[str, int] | None = None
) -> PreTrainedModel:
    """A `cls` that holds the members: packed where each has its own rows, averaged where they share.

    trunks: by tower, how many leading layers are one for all members
    """
    towers = tower_configs(members[0].config)
    kept = {}
    for tower in towers:
        of_members = [tower_configs(member.config)[tower].kept_heads for member in members]
        layers = range(len(of_members[0]))
        kept[tower] = [[heads[layer][0] for heads in of_members] for layer in layers]
    if differ_in_vision_alone(members):
        kept["text"] = [layer[:1] for layer in kept["text"]]

    reference = next(iter(members[0].tensors.values()))
    config = hydra_config(cls.config_class, members[0].config, kept, shared, trunks)
    for part in (config, *tower_configs(config).values()):
        part.dtype = reference.dtype
    with torch.device(reference.device), no_init_weights(), default_dtype(reference.dtype):
        model = cls(config)
    with torch.no_grad():
        for name, slot in slots(model):
            _fill(model.get_parameter(name), slot, members)
    return model.eval()


def differ_in_vision_alone(members: list[Member]) -> bool:
    """Whether members of two towers are equal in the text tower, which then need exist only once."""
    first, others = members[0].tensors, members[1:]
    if "text" not in tower_configs(members[0].config):
        return False

    def are_equal(side: str) -> bool:
        names = [name for name in first if name.startswith(side)]
        return all(
            torch.equal(other.tensors[name].to(first[name].device), first[name]) for other in others for name in names
        )

    return are_equal("text_") and not are_equal("vis")


def _fill(parameter: torch.Tensor, slot: Slot, members: list[Member]) -> None:
    if slot.member is not None:
        parameter.copy_(members[slot.member].tensors[slot.name])
    elif slot.rows is not None:
        for rows, member in zip(parameter.split(slot.rows), members, strict=False):
            rows.copy_(member.tensors[slot.name])
    elif len(members) == 1:
        parameter.copy_(members[0].tensors[slot.name])
    else:
        # In float64, the mean of equal tensors is bit for bit that tensor.
        device = "cpu" if parameter.device.type == "mps" else parameter.device  # MPS has no float64
        total = torch.zeros(parameter.shape, dtype=torch.float64, device=device)
        for member in members:
            total += member.tensors[slot.name].to(device)
        parameter.copy_(total / len(members))


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
