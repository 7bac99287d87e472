"""Checks that members can be fused: they agree on the architecture, differ in their weights, and have something in common."""

from collections.abc import Sequence
from dataclasses import fields
from itertools import combinations

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.auto import check_classes, hydra_class
from .blending import cosines
from .reading import Member, have_equal_tensors, read_members
from .structure import member_fields, slots, tower_configs


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here too.
logger = logging.get_logger(f"transformers.{__name__}")

# Config fields in which members may differ: they say how a member was made or trains, not what it computes.
OWN_FIELDS = {
    *("use_cache", "tie_word_embeddings", "encoder_stride", "kept_heads", "kept_neurons", "shared", "trunk_layers"),
    *("ensemble_loss", "fast_inference", "decision"),
}
OWN_KINDS = ("dropout", "drop_path", "initializer", "_init_value", "layerscale_value", "_out_", "reshape_hidden")
# "is_causal" is no field of any class, but Transformers reads it from every config that has it.
COMMON_FIELDS = ("is_causal", "num_labels", "id2label", "problem_type")
# Networks trained apart have a cosine near 0, fine-tunings of one model near 1.
LITTLE_IN_COMMON = 0.5


def check_can_be_fused(models: Sequence[PreTrainedModel], name: str, allow_equal: bool = True) -> None:
    """Refuses models that cannot be fused: of different architectures, classes or dtypes.

    name: what errors call the list
    allow_equal: whether some of them may be the same model
    """
    found = hydra_class(models[0], f"{name}[0]")
    check_classes(models, found, name)
    members = [read_members(found, model, f"{name}[{place}]")[0] for place, model in enumerate(models)]
    for member in members:
        check_agrees(member, members[0])
    if not allow_equal:
        check_differ(members)


def check_differ(members: Sequence[Member]) -> None:
    """Refuses a single member, and members with the same heads and weights: an ensemble of them is one model."""
    if len(members) == 1:
        raise ValueError(
            f"there is one member, {members[0].name}, and an ensemble of one model knows no disagreement: pass several, or "
            "allow_equal=True"
        )
    for pair in combinations(members, 2):
        first, second = (member_fields(member.config) for member in pair)
        if first == second and have_equal_tensors(pair, pair[0].tensors):
            raise ValueError(
                f"{pair[0].name} and {pair[1].name} have the same heads and weights and would agree on everything: pass "
                "members that differ, or allow_equal=True for members that training is to make different"
            )


def check_agrees(member: Member, first: Member) -> None:
    """Refuses a member of another architecture, label set or dtype than the first."""
    for tower, config in tower_configs(member.config).items():
        _check_fields(member, first, config, tower_configs(first.config)[tower], f"{tower}_config." if tower else "")
    _check_fields(member, first, member.config, first.config, "")
    for name, tensor in member.tensors.items():
        if tensor.dtype != first.tensors[name].dtype:
            raise ValueError(
                f"{member.name} is {tensor.dtype} ({name}), {first.name} is {first.tensors[name].dtype}: convert all "
                "members to one dtype"
            )


def _check_fields(
    member: Member, first: Member, config: PreTrainedConfig, expected: PreTrainedConfig, prefix: str
) -> None:
    for field in architecture_fields(type(config)):
        mine, theirs = getattr(config, field, None), getattr(expected, field, None)
        if mine != theirs:
            is_choice = field == "problem_type"
            instead = "set it alike in their configs" if is_choice else "all members must come from one backbone"
            raise ValueError(
                f"{member.name} has {prefix}{field} = {_short(mine)}, {first.name} has {_short(theirs)}: {instead}"
            )


def architecture_fields(config_class: type) -> list[str]:
    """The fields that decide what a member computes: all members must agree on them."""
    excluded = {field.name for field in fields(PreTrainedConfig)} | OWN_FIELDS
    names = [field.name for field in fields(config_class) if field.name not in excluded]
    # Towers are compared one by one.
    kept = [name for name in names if not name.endswith("_config") and not any(kind in name for kind in OWN_KINDS)]
    return [*kept, *COMMON_FIELDS]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_finite(member: Member) -> None:
    for name, tensor in member.tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{member.name}: {name} has NaN or infinite values: this member cannot be fused")


def warn_of_strangers(model: PreTrainedModel, members: list[Member]) -> None:
    """Warns of members whose shared matrices point elsewhere than the first one's: their average works like neither of them."""
    first = members[0].tensors
    matrices = [slot.name for _, slot in slots(model) if slot.is_shared and first[slot.name].dim() > 1]
    for member in members[1:]:
        cosine = cosines({name: [first[name], member.tensors[name]] for name in matrices}).get("0-1")
        if cosine is not None and cosine < LITTLE_IN_COMMON:
            logger.warning(
                f"{member.name} has little in common with {members[0].name} (cosine similarity {cosine:.2f} of what they "
                "share), and the mean of networks trained apart is neither of them: pass members of one backbone, or "
                "shared=() to keep each whole"
            )
