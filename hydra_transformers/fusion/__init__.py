"""From backbones to members to a fused Hydra, and back: the constructors of every Hydra class.

Building a model takes the package; running one does not. So this is no part of the code that a saved model takes along,
whose classes call it by name. It works on their copies of the classes as on the package's.
"""

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ..models.configuration_hydra import SHARED_PARTS, TrunkLayers, check_shared
from .agreement import check_agrees, check_can_be_fused, check_differ, check_finite, warn_of_strangers
from .building import build, prune, prune_neurons, remaining_heads
from .exporting import FIELDS_OF_HYDRAS, to_transformers
from .linear_layers import with_linear_layers
from .packed_heads import heads_at, qkv_by_head, qkv_rows, queries_per_key
from .probe import check_answers_alike, example_inputs, warn_of_close_members
from .reading import Member, backbone_names, dense_outline, projection_names, read_members
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


def from_backbone(
    cls: type, model: PreTrainedModel, heads_to_prune: dict | None, check: bool = True
) -> PreTrainedModel:
    """`cls.from_backbone`"""
    member = _only_member(cls, model, "from_backbone")
    pruned = prune(cls, member, heads_to_prune)
    whole = _checked_whole(cls, member, model) if check else None
    return build(cls, [pruned], SHARED_PARTS) if heads_to_prune or whole is None else whole


def without_neurons(cls: type, model: PreTrainedModel, neurons_to_prune: dict) -> PreTrainedModel:
    """A one-member `cls` of `model` with neurons of its MLPs cut out."""
    member = _only_member(cls, model, "prune_neurons")
    pruned = prune_neurons(cls, member, neurons_to_prune)
    _checked_whole(cls, member, model)
    return build(cls, [pruned], SHARED_PARTS)


def _only_member(cls: type, model: PreTrainedModel, caller: str) -> Member:
    members = list(read_members(cls, model, "model"))
    if len(members) != 1:
        raise ValueError(f"{caller} got a Hydra of {len(members)} members: pass one of them, model.member(i)")
    return members[0]


def _checked_whole(cls: type, member: Member, model: PreTrainedModel) -> PreTrainedModel | None:
    """The member with all that it has as a Hydra, compared with the backbone it was read from; None for one of a Hydra."""
    if model.config.model_type == cls.config_class.model_type:
        return None
    whole = build(cls, [member], SHARED_PARTS)
    check_answers_alike(whole, model.base_model if cls.is_base_model else model, member.name)
    return whole


def from_pruned_members(
    cls: type,
    members: Sequence[PreTrainedModel],
    shared: Sequence[str],
    trunk_layers: TrunkLayers = None,
    allow_equal: bool = False,
    check: bool = True,
) -> PreTrainedModel:
    """`cls.from_pruned_members`"""
    if isinstance(members, nn.Module):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
    check_shared(shared)
    read: list[Member] = []
    for position, model in enumerate(members):
        found = list(read_members(cls, model, f"members[{position}]"))
        if check:
            _checked_whole(cls, found[0], model)
        read += found
    if not read:
        raise ValueError("members is empty: pass at least one model")
    for member in read:
        check_agrees(member, read[0])
        check_finite(member)
    if not allow_equal:
        check_differ(read)
    hydra = build(cls, read, shared, trunks_of(cls, read, shared, trunk_layers))
    warn_of_strangers(hydra, read)
    if check and not allow_equal:
        warn_of_close_members(hydra, [member.name for member in read])
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
    "example_inputs",
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
