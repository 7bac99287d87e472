"""From backbones to members to a fused Hydra, and back.

The classes of a saved model call this package by name to build models; to run one they do not need
it.
"""

import os
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel

from ..models.auto import hydra_class, load_trained
from ..models.configuration_hydra import TrunkLayers, check_shared
from .building import build, prune_heads
from .checks import check_agrees, check_differ, check_finite, warn_if_unrelated
from .new_classifiers import read_with_new_classifiers
from .plain_models import to_transformers
from .probe import check_same_outputs, warn_if_nearly_equal
from .reading import read_members
from .structure import Member, without_head
from .trunk import resolve_trunk


def from_backbone(
    cls: type,
    model: PreTrainedModel | str | os.PathLike,
    heads_to_prune: dict | None,
    check: bool = True,
    num_members: int = 1,
    trunk_layers: TrunkLayers = 0.75,
    num_labels: int | None = None,
    class_names: Sequence[str] | None = None,
    problem_type: str | None = None,
    seed: int = 0,
    shared: Sequence[str] = ("embeddings",),
) -> PreTrainedModel:
    """Build a Hydra of `model`: one member with its classifier, or members with new ones. See
    `AutoHydra.from_backbone`."""
    if num_members != 1 or (num_labels, class_names, problem_type) != (None, None, None):
        check_shared(shared)
        backbone, first, classifiers = read_with_new_classifiers(
            cls, model, num_members, num_labels, class_names, problem_type, seed
        )
        if check:
            _compared(cls, first, backbone)
        pruned = prune_heads(cls, first, heads_to_prune)
        members = [
            Member(f"member {index}", pruned.config, pruned.tensors | classifier)
            for index, classifier in enumerate(classifiers)
        ]
        if num_members == 1:
            return build(cls, members)
        return build(cls, members, shared, resolve_trunk(cls, members, shared, trunk_layers))
    if not isinstance(model, nn.Module):
        model = load_trained(model)
    members = read_members(cls, model, "model")
    if len(members) != 1:
        raise ValueError(f"model is a Hydra of {len(members)} members: pass one of them, model.member(i)")
    [member] = members
    pruned = prune_heads(cls, member, heads_to_prune)
    hydra = _compared(cls, member, model) if check else None
    return build(cls, [pruned]) if heads_to_prune or hydra is None else hydra


def from_pruned_members(
    cls: type,
    members: Sequence[PreTrainedModel],
    shared: Sequence[str],
    trunk_layers: TrunkLayers = None,
    allow_equal: bool = False,
    check: bool = True,
) -> PreTrainedModel:
    """Build a Hydra of these members, which are averaged in the parts that `shared` names. See
    `AutoHydra.from_pruned_members`."""
    check_shared(shared)
    read: list[Member] = []
    for position, model in enumerate(members):
        of_model = read_members(cls, model, f"members[{position}]")
        for index, member in enumerate(of_model) if check else ():
            _compared(cls, member, model, index)
        read += of_model
    for member in read:
        check_agrees(member, read[0])
        check_finite(member)
    if not allow_equal:
        check_differ(read)
    hydra = build(cls, read, shared, resolve_trunk(cls, read, shared, trunk_layers))
    warn_if_unrelated(hydra, read)
    if check and not allow_equal:
        warn_if_nearly_equal(hydra, [member.name for member in read])
    return hydra


def check_can_be_fused(models: Sequence[PreTrainedModel], name: str, allow_equal: bool = True) -> None:
    """Raises for models that cannot be fused: of different architectures, classes or dtypes.

    name: what errors call the list
    allow_equal: whether some of them may be the same model
    """
    cls = hydra_class(models[0], f"{name}[0]")
    members = [read_members(cls, model, f"{name}[{place}]")[0] for place, model in enumerate(models)]
    for member in members:
        check_agrees(member, members[0])
    if not allow_equal:
        check_differ(members)


def member(model: PreTrainedModel, index: int) -> PreTrainedModel:
    """Return member `index` of a Hydra as a Hydra of its own; a negative index counts from the
    end."""
    if not -model.num_members <= index < model.num_members:
        raise IndexError(f"member {index} does not exist: this Hydra has members 0 to {model.num_members - 1}")
    cls, index = type(model), index % model.num_members
    return _compared(cls, read_members(cls, model, cls.__name__)[index], model, index)


def _compared(cls: type, member: Member, model: PreTrainedModel, index: int = 0) -> PreTrainedModel:
    """Return the member as a Hydra, which gives the outputs of the model that it was read from.

    index: its number in `model`, where that is a Hydra
    """
    hydra = build(cls, [member])
    is_hydra = model.config.model_type == cls.config_class.model_type
    check_same_outputs(hydra, without_head(cls, model), member.name, index if is_hydra else None)
    return hydra


__all__ = ["to_transformers"]
