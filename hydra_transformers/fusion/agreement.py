"""Whether members can be fused: they agree on all that decides what they compute."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import combinations

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.auto import check_classes, hydra_class
from .reading import Member, read_members
from .structure import slots, tower_configs


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here too.
logger = logging.get_logger(f"transformers.{__name__}")


# Config fields that a member may have its own way: they say how it was made or is trained, not what it computes.
OWN_FIELDS = {
    "use_cache",
    "tie_word_embeddings",
    "encoder_stride",
    "kept_heads",
    "kept_neurons",
    "shared",
    "trunk_layers",
    "ensemble_loss",
    "fast_inference",
    "decision",
}
OWN_KINDS = ("dropout", "drop_path", "initializer", "_init_value", "layerscale_value", "_out_", "reshape_hidden")
# Networks of different training have a cosine near 0, fine-tunings of one model near 1.
LITTLE_IN_COMMON = 0.5
LABEL_FIELDS = ("num_labels", "id2label", "problem_type")
# Which Transformers reads of every config that has it, though no class names it.
UNNAMED_FIELDS = ("is_causal",)


def check_can_be_fused(models: Sequence[PreTrainedModel], name: str, allow_equal: bool = True) -> None:
    """Refuses models of different architectures, classes or dtypes, of which no Hydra could be made.

    name: what the caller calls the list
    allow_equal: whether some of them may be one and the same model
    """
    found = hydra_class(models[0], f"{name}[0]")
    check_classes(models, found, name)
    read = [next(read_members(found, model, f"{name}[{place}]")) for place, model in enumerate(models)]
    for member in read:
        check_agrees(member, read[0])
    if not allow_equal:
        check_differ(read)


def check_differ(members: Sequence[Member]) -> None:
    """Refuses a single member, and members with the same heads and weights: an ensemble of them is one model."""
    if len(members) == 1:
        raise ValueError(
            f"there is one member, {members[0].name}, and an ensemble of one model knows no disagreement: pass several, or "
            "allow_equal=True"
        )
    for member, other in combinations(members, 2):
        if _are_equal(member, other):
            raise ValueError(
                f"{member.name} and {other.name} have the same heads and weights and would agree on everything: pass members "
                "that differ, or allow_equal=True for members that training is to make different"
            )


def _are_equal(member: Member, other: Member) -> bool:
    return all(
        tensor.shape == other.tensors[name].shape and torch.equal(tensor, other.tensors[name].to(tensor.device))
        for name, tensor in member.tensors.items()
    ) and all(
        (mine.kept_heads, mine.kept_neurons) == (theirs.kept_heads, theirs.kept_neurons)
        for mine, theirs in zip(
            tower_configs(member.config).values(), tower_configs(other.config).values(), strict=True
        )
    )


def check_agrees(member: Member, first: Member) -> None:
    """Refuses a member of another architecture, label set or dtype than the first."""
    for tower, config in tower_configs(member.config).items():
        expected = tower_configs(first.config)[tower]
        _check_fields(member, first, config, expected, f"{tower}_config." if tower else "")
    _check_fields(member, first, member.config, first.config, "")
    for name, tensor in member.tensors.items():
        if tensor.dtype != first.tensors[name].dtype:
            raise ValueError(
                f"{member.name} is {tensor.dtype} ({name}), {first.name} is {first.tensors[name].dtype}: convert all "
                "members to one dtype"
            )


def _check_fields(member: Member, first: Member, config, expected, prefix: str) -> None:
    for field in architecture_fields(type(config)):
        mine, theirs = getattr(config, field, None), getattr(expected, field, None)
        if mine != theirs:
            instead = (
                "set it alike in their configs"
                if field == "problem_type"
                else "all members must come from one backbone"
            )
            raise ValueError(
                f"{member.name} has {prefix}{field} = {_short(mine)}, {first.name} has {_short(theirs)}: {instead}"
            )


def architecture_fields(config_class: type) -> list[str]:
    """The fields that decide what a member computes: all members must agree on them."""
    common = {field.name for field in fields(PreTrainedConfig)}
    own = [field.name for field in fields(config_class) if field.name not in common | OWN_FIELDS]
    own = [name for name in own if not name.endswith("_config")]  # towers are compared one by one
    return [name for name in own if not any(kind in name for kind in OWN_KINDS)] + [*UNNAMED_FIELDS, *LABEL_FIELDS]


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_finite(member: Member) -> None:
    for name, tensor in member.tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{member.name}: {name} has NaN or infinite values: this member cannot be fused")


def warn_of_strangers(model: PreTrainedModel, members: list[Member]) -> None:
    """Tells of members whose shared matrices point elsewhere than the first one's: their mean works like neither of them."""
    shared = [slot.name for _, slot in slots(model) if slot.member is None and slot.rows is None]
    matrices = [name for name in shared if members[0].tensors[name].dim() > 1]
    for member in members[1:]:
        found = similarity(members[0].tensors, member.tensors, matrices)
        if found is not None and found < LITTLE_IN_COMMON:
            logger.warning(
                f"{member.name} has little in common with {members[0].name} (cosine similarity {found:.2f} of what they "
                "share), and the mean of networks trained apart is neither of them: pass members of one backbone, or "
                "shared=() to keep each whole"
            )


def similarity(
    first: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], names: Iterable[str]
) -> float | None:
    """The cosine between two models' tensors of these names; None where there are none, or one has nothing but zeros."""
    products = [0.0, 0.0, 0.0]
    for name in names:
        a, b = (each[name].detach().flatten().float() for each in (first, other))
        b = b.to(a.device)
        of_tensor = torch.stack([a @ b, a @ a, b @ b]).tolist()
        products = [total + product for total, product in zip(products, of_tensor, strict=True)]
    return products[0] / math.sqrt(products[1] * products[2]) if all(products[1:]) else None
