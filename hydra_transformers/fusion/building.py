"""Cuts heads out of members, and builds the models that hold members."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.configuration_hydra import SHARED_PARTS
from ..models.modeling_hydra import HydraAttention
from .packed_heads import heads_at, places, qkv_rows
from .structure import (
    Member,
    Slot,
    attention_names,
    have_equal_tensors,
    hydra_config,
    member_fields,
    outline,
    slots,
    tower_configs,
)


def prune_heads(cls: type, member: Member, heads_to_prune: dict | None) -> Member:
    """Return the member with heads cut out: q, k, v, o and tables of positions lose the heads'
    rows, the config their numbers."""
    # Heads before and after.
    fields = member_fields(member.config)
    kept = {}
    for tower, values in fields.items():
        kept[tower] = [heads for [heads] in values["kept_heads"]]
    remaining = remaining_heads(kept, heads_to_prune)

    # Their rows.
    tensors = dict(member.tensors)
    empty = outline(cls, member.config)
    for tower, names in attention_names(empty).items():
        fields[tower]["kept_heads"] = [[heads] for heads in remaining[tower]]
        for name, before, after in zip(names, kept[tower], remaining[tower], strict=True):
            if after != before:
                replace_heads(tensors, name, empty.get_submodule(name), before, after)
    config = hydra_config(cls.config_class, member.config, fields)
    return Member(member.name, config, tensors)


def replace_heads(
    tensors: dict[str, torch.Tensor], name: str, attention: HydraAttention, before: Sequence[int], after: Sequence[int]
) -> None:
    """Give the attention with this name the heads `after` in place of `before`; those that it did
    not have are zeros."""
    positions = places(after, before)
    for parameter in (f"{name}.qkv_proj.weight", f"{name}.qkv_proj.bias"):
        if parameter in tensors:
            tensors[parameter] = qkv_rows(tensors[parameter], before, after, attention)
    output = f"{name}.o_proj.weight"
    tensors[output] = heads_at(tensors[output], positions, attention.head_dim)
    for part, rows in attention.rows_per_head().items():
        for parameter in (f"{name}.{part}.weight", f"{name}.{part}.bias"):
            if parameter in tensors:
                tensors[parameter] = heads_at(tensors[parameter], positions, rows)


def remaining_heads(kept: dict[str, list[list[int]]], heads_to_prune: dict | None) -> dict[str, list[list[int]]]:
    """Return the heads that are left per tower and layer.

    kept: those before, by tower and layer; `{"": ...}` for a model without towers
    heads_to_prune: `{layer: [heads]}`, for two towers by tower
    """
    by_tower = heads_to_prune or {}
    if list(kept) == [""]:
        by_tower = {"": by_tower}
    if not isinstance(by_tower, dict) or not by_tower.keys() <= kept.keys():
        raise ValueError(f"heads_to_prune is {by_tower!r:.60}: pass {{'vision': {{layer: [heads]}}, 'text': ...}}")
    remaining = {}
    for tower, layers in kept.items():
        remaining[tower] = _remaining_in_tower(layers, by_tower.get(tower) or {})
    return remaining


def _remaining_in_tower(kept: list[list[int]], heads_to_prune: dict) -> list[list[int]]:
    pruned: list[set[int]] = [set() for _ in kept]
    for layer, heads in heads_to_prune.items():
        if str(layer) not in map(str, range(len(kept))):
            raise ValueError(f"heads_to_prune names layer {layer}: the model has layers 0 to {len(kept) - 1}")
        for head in heads:
            if not hasattr(head, "__index__") or head not in kept[int(layer)]:
                raise ValueError(f"heads_to_prune[{layer}] names {head!r}: the heads are {kept[int(layer)]}")
            pruned[int(layer)].add(int(head))
    remaining = []
    for heads, gone in zip(kept, pruned, strict=True):
        remaining.append([head for head in heads if head not in gone])
    return remaining


def build(
    cls: type, members: list[Member], shared: Sequence[str] = SHARED_PARTS, trunks: dict[str, int] | None = None
) -> PreTrainedModel:
    """Build a `cls` that holds the members: packed where each has its own rows, averaged where they
    share.

    trunks: by tower, how many leading layers all members share
    """
    # The config.
    fields = {}
    for tower in tower_configs(members[0].config):
        holders = members
        if tower == "text" and _differ_in_vision_alone(members):
            holders = members[:1]
        heads_of_members = [tower_configs(member.config)[tower].kept_heads for member in holders]
        kept_heads = []
        for layer in zip(*heads_of_members, strict=True):
            kept_heads.append([heads for [heads] in layer])
        fields[tower] = {"kept_heads": kept_heads, "trunk_layers": (trunks or {}).get(tower, 0)}
    reference = next(iter(members[0].tensors.values()))
    config = hydra_config(cls.config_class, members[0].config, fields, shared)
    for part in (config, *tower_configs(config).values()):
        part.dtype = reference.dtype

    # The model, and its weights.
    with empty_init_like(reference):
        model = cls(config)
    model.name_or_path = ""  # of adapters' base model: no folder has these weights yet
    with torch.no_grad():
        for name, slot in slots(model):
            _fill(model.get_parameter(name), slot, members)
    return model.eval()


def _differ_in_vision_alone(members: list[Member]) -> bool:
    """Whether the members' text towers are equal, so that one is enough, and their vision towers
    are not."""
    text = [name for name in members[0].tensors if name.startswith("text_")]
    vision = [name for name in members[0].tensors if name.startswith(("vision_", "visual_"))]
    return have_equal_tensors(members, text) and not have_equal_tensors(members, vision)


def _fill(parameter: torch.Tensor, slot: Slot, members: list[Member]) -> None:
    if slot.member is not None:
        parameter.copy_(members[slot.member].tensors[slot.name])
    elif slot.rows is not None:
        for rows, member in zip(parameter.split(slot.rows), members, strict=False):
            rows.copy_(member.tensors[slot.name])
    else:
        first, *others = [member.tensors[slot.name] for member in members]
        if all(tensor is first for tensor in others):
            parameter.copy_(first)
        else:
            parameter.copy_(mean_of([first, *others], parameter.device))


def mean_of(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the mean in float64: that of equal tensors is bit for bit that tensor."""
    if device.type == "mps":  # it has no float64
        device = torch.device("cpu")
    total = torch.zeros(tensors[0].shape, dtype=torch.float64, device=device)
    for tensor in tensors:
        total += tensor.to(device)
    return total / len(tensors)


@contextmanager
def empty_init_like(like: torch.Tensor) -> Iterator[None]:
    """Give new models the dtype and device of `like` and weights that are not initialised. Some
    classes draw weights all the same: the global random state is restored afterwards."""
    fork = torch.random.fork_rng(devices=[like.device] if like.is_cuda else [])
    with fork, torch.device(like.device), no_init_weights(), default_dtype(like.dtype):
        yield


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Give new parameters this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
