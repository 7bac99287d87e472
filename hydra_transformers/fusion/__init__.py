"""From backbones to members to a fused Hydra, and back: the constructors of every Hydra class.

Building a model takes the package; running one does not. So this is no part of the code that a saved model takes along,
whose classes call it by name. It works on their copies of the classes as on the package's.
"""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ..models.configuration_hydra import SHARED_PARTS, TrunkLayers, check_shared
from .agreement import check_agrees, check_can_be_fused, check_finite, warn_of_strangers
from .building import build, prune, prune_neurons, remaining_heads
from .exporting import FIELDS_OF_HYDRAS, to_transformers
from .linear_layers import with_linear_layers
from .packed_heads import heads_at, qkv_by_head, qkv_rows, queries_per_key
from .reading import backbone_names, dense_outline, projection_names, read_members
from .structure import (
    attention_names,
    config_in_backbone,
    encoder_config,
    fields_of_backbone,
    hydra_config,
    saved_tower_configs,
    slots,
    tower_configs,
    without_weights,
)
from .trunk import trunks_of


def from_backbone(cls: type, model: PreTrainedModel, heads_to_prune: dict | None) -> PreTrainedModel:
    """`cls.from_backbone`"""
    members = list(read_members(cls, model, "model"))
    if len(members) != 1:
        raise ValueError(f"from_backbone got a Hydra of {len(members)} members: pass one of them, model.member(i)")
    return build(cls, [prune(cls, members[0], heads_to_prune)], SHARED_PARTS)


def without_neurons(cls: type, model: PreTrainedModel, neurons_to_prune: dict) -> PreTrainedModel:
    """A one-member `cls` of `model` with neurons of its MLPs cut out."""
    members = list(read_members(cls, model, "model"))
    if len(members) != 1:
        raise ValueError(f"prune_neurons got a Hydra of {len(members)} members: pass one of them, model.member(i)")
    return build(cls, [prune_neurons(cls, members[0], neurons_to_prune)], SHARED_PARTS)


def from_pruned_members(
    cls: type, members: Sequence[PreTrainedModel], shared: Sequence[str], trunk_layers: TrunkLayers = None
) -> PreTrainedModel:
    """`cls.from_pruned_members`"""
    if isinstance(members, nn.Module):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
    check_shared(shared)
    read = [
        member for position, model in enumerate(members) for member in read_members(cls, model, f"members[{position}]")
    ]
    if not read:
        raise ValueError("members is empty: pass at least one model")
    for member in read:
        check_agrees(member, read[0])
        check_finite(member)
    hydra = build(cls, read, shared, trunks_of(cls, read, shared, trunk_layers))
    warn_of_strangers(hydra, read)
    return hydra


def member(model: PreTrainedModel, index: int) -> PreTrainedModel:
    """`model.member(index)`"""
    if not -model.num_members <= index < model.num_members:
        raise IndexError(f"member {index} does not exist: this Hydra has members 0 to {model.num_members - 1}")
    cls = type(model)
    return build(cls, [list(read_members(cls, model, cls.__name__))[index]], SHARED_PARTS)


__all__ = [
    "FIELDS_OF_HYDRAS",
    "attention_names",
    "backbone_names",
    "check_can_be_fused",
    "config_in_backbone",
    "dense_outline",
    "encoder_config",
    "fields_of_backbone",
    "from_backbone",
    "from_pruned_members",
    "heads_at",
    "hydra_config",
    "member",
    "projection_names",
    "qkv_by_head",
    "qkv_rows",
    "queries_per_key",
    "remaining_heads",
    "saved_tower_configs",
    "slots",
    "to_transformers",
    "tower_configs",
    "with_linear_layers",
    "without_neurons",
    "without_weights",
]
