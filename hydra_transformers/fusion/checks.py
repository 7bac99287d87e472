"""Checks of models and members: whether a model's weights can be read as they are, and whether
members can be fused.

A Hydra takes over weights and config alone. `probe.check_same_outputs` tells whether that is all
that a model computes with.
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.auto import check_has_no_adapters
from ..models.configuration_hydra import HydraConfigMixin
from .structure import Member, have_equal_tensors, member_fields, outline, slots, tower_configs


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here
# too.
logger = logging.get_logger(f"transformers.{__name__}")

# Their forward hooks only record outputs, watch for training, or move tensors between devices.
MODULES_OF_HARMLESS_HOOKS = ("transformers.", "accelerate.", "hydra_transformers.uncertainty.")
# Parameters that do not affect the output: poolers that the task does not use, and tokens that hide
# patches in pre-training.
UNUSED = ("pooler", "mask_token")
# Config fields in which members may differ: they say how a member was made or trains, not what it
# computes.
IGNORED_FIELDS = {*HydraConfigMixin.__annotations__, "use_cache", "tie_word_embeddings", "encoder_stride"}
IGNORED_FIELD_PATTERNS = ("dropout", "drop_path", "initializer", "_init_value", "layerscale_value")
IGNORED_FIELD_PATTERNS += ("_out_", "reshape_hidden")
# "is_causal" is not a field of any class, but Transformers reads it from every config that has it.
COMMON_FIELDS = ("is_causal", "num_labels", "id2label", "problem_type")
# What to do about members that differ in a field; else they are of different backbones.
SAME_LABELS = "pass models fine-tuned on the same labels, or set id2label alike if only names differ"
SAME_LAYER_SCALE = "False was saved before version 0.4, with LayerScale folded into the maps: build all members anew"
CHOICES = {
    "layer_scale": SAME_LAYER_SCALE,
    "problem_type": "set it alike in their configs",
    "num_labels": SAME_LABELS,
    "id2label": SAME_LABELS,
}
# Networks trained apart have a cosine near 0, fine-tuned models of one pre-trained model near 1.
LEAST_COSINE_OF_RELATED = 0.5


# Models


def check_is_in_memory(model: PreTrainedModel, name: str) -> None:
    """Raise for a model with weights on the meta device."""
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{name} has weights that are not in memory (offloaded or on the meta device): load it whole")


def check_can_be_read(model: PreTrainedModel, name: str) -> None:
    """Raise for adapters, for weights that are not in memory, and for codes of numbers, or shards
    of them, in their place."""
    check_has_no_adapters(model, name)
    check_is_in_memory(model, name)
    encoded = [(key, tensor) for key, tensor in model.named_parameters() if not is_plain(tensor)]
    if encoded or getattr(model, "is_quantized", False):
        where = ""
        if encoded:
            key, weight = encoded[0]
            kind = type(weight.data)
            what = str(weight.dtype) if kind is torch.Tensor else f"a {kind.__name__}"
            where = f": {key} is {what}"
        raise ValueError(
            f"{name} ({type(model).__name__}) is quantised or sharded{where}: load it without, or pass "
            "model.dequantize()"
        )


def is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a plain tensor of floating-point numbers of at least 16 bits."""
    return parameter.is_floating_point() and parameter.element_size() > 1 and type(parameter.data) is torch.Tensor


def check_has_no_hooks(model: PreTrainedModel, name: str) -> None:
    """Raise for forward hooks, which a Hydra built from the model would not have."""
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            is_harmless = f"{_module_of(hook)}.".startswith(MODULES_OF_HARMLESS_HOOKS)
            if not is_harmless:
                hook_name = getattr(hook, "__qualname__", hook)
                raise ValueError(
                    f"{name} has a forward hook on {path or 'itself'} ({hook_name}), which its Hydra would not have: "
                    "remove it (handle.remove(), or leave the block that added it)"
                )


def _module_of(function: Callable) -> str:
    """Return the module that defines a function, or the class of a callable object."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__module__", None) or type(function).__module__


def check_is_all_read(cls: type, model: PreTrainedModel, read: Iterable[str], name: str) -> None:
    """Raise for a backbone with parameters that were not read: they would be lost."""
    known = set(read)
    unused = UNUSED
    if getattr(model.config, "relative_attention", None) is False:
        unused = (*UNUSED, "encoder.LayerNorm.")  # of distances that nothing is compared with
    for key, _ in model.named_parameters():
        is_unused = key.startswith(cls.unused_prefixes) or any(part in key for part in unused)
        if key not in known and not is_unused:
            raise ValueError(
                f"{name} ({type(model).__name__}) has the parameter {key!r}, which {cls.__name__} does not know and "
                "would leave out: merge or remove what was added to the model"
            )


# Members


def check_shapes_and_dtypes(cls: type, member: Member) -> None:
    """Raise for tensors of other shapes than the config asks for, and of several dtypes: a Hydra
    has one."""
    # Shapes.
    for name, parameter in outline(cls, member.config).named_parameters():
        if name not in member.tensors:
            raise ValueError(
                f"{member.name} has no parameter {name!r}: it was changed after it was made (quantised, or a part "
                "replaced), pass it as it was before"
            )
        shape = member.tensors[name].shape
        if shape != parameter.shape:
            raise ValueError(
                f"{member.name}: {name} has shape {tuple(shape)}, its config has {tuple(parameter.shape)}"
            )

    # Dtypes.
    first = next(iter(member.tensors))
    expected = member.tensors[first].dtype
    for name, tensor in member.tensors.items():
        if tensor.dtype != expected:
            raise ValueError(
                f"{member.name} has weights of several dtypes ({first} is {expected}, {name} is {tensor.dtype}): "
                f"convert it to one, with model.to({expected})"
            )


def check_differ(members: Sequence[Member]) -> None:
    """Raise for a single member, and for members with the same heads and weights: an ensemble of
    them is one model."""
    if len(members) == 1:
        raise ValueError(
            f"there is one member, {members[0].name}, and an ensemble of one model knows no disagreement: pass "
            "several, or allow_equal=True"
        )
    for first, second in combinations(members, 2):
        have_same_heads = member_fields(first.config) == member_fields(second.config)
        if have_same_heads and have_equal_tensors((first, second), first.tensors):
            raise ValueError(
                f"{first.name} and {second.name} have the same heads and weights and would agree on everything: pass "
                "others (when pruning, another budget or other data), or allow_equal=True to train them apart "
                "afterwards"
            )


def check_agrees(member: Member, first: Member) -> None:
    """Raise for a member of another architecture, label set or dtype than the first."""
    expected = tower_configs(first.config)
    for tower, config in tower_configs(member.config).items():
        prefix = f"{tower}_config." if tower else ""
        _check_fields(member, first, config, expected[tower], prefix)
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
    """Raise where the configs of two members, or of their towers, differ in what they compute."""
    for field in architecture_fields(type(config)):
        mine = getattr(config, field, None)
        theirs = getattr(expected, field, None)
        if mine != theirs:
            instead = CHOICES.get(field, "all members must come from one backbone")
            raise ValueError(
                f"{member.name} has {prefix}{field} = {mine!r:.60}, {first.name} has {theirs!r:.60}: {instead}"
            )


def architecture_fields(config_class: type) -> list[str]:
    """Return the fields that decide what a member computes: all members must agree on them."""
    ignored = {field.name for field in fields(PreTrainedConfig)} | IGNORED_FIELDS
    names = []
    for field in fields(config_class):
        is_tower = field.name.endswith("_config")  # towers are compared one by one
        is_of_training = any(part in field.name for part in IGNORED_FIELD_PATTERNS)
        if field.name not in ignored and not is_tower and not is_of_training:
            names.append(field.name)
    return [*names, *COMMON_FIELDS]


def check_finite(member: Member) -> None:
    """Raise for weights that are no numbers."""
    for name, tensor in member.tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{member.name}: {name} has NaN or infinite values: this member cannot be fused")


def warn_if_unrelated(model: PreTrainedModel, members: list[Member]) -> None:
    """Warn of members whose shared matrices have little in common with the first one's: their mean
    works like neither."""
    first = members[0].tensors
    matrices = [slot.name for _, slot in slots(model) if slot.is_shared and first[slot.name].dim() > 1]
    for member in members[1:]:
        cosine = cosine_of((first[name], member.tensors[name]) for name in matrices)
        if cosine is not None and cosine < LEAST_COSINE_OF_RELATED:
            logger.warning(
                f"{member.name} has little in common with {members[0].name} (cosine similarity {cosine:.2f} of what "
                "they share), and the mean of networks trained apart is neither of them: pass members of one "
                "backbone, or shared=() to keep each whole"
            )


def cosine_of(pairs: Iterable[tuple[Tensor, Tensor]]) -> float | None:
    """Return the cosine similarity of two models, by pairs of their tensors; None where one of them
    has only zeros."""
    products = torch.zeros(3, dtype=torch.float64, device="cpu")
    for first, second in pairs:
        a = first.detach().flatten().float()
        b = second.detach().flatten().float().to(first.device)
        products += torch.stack([a @ b, a @ a, b @ b]).cpu().double()
    length = float((products[1] * products[2]).sqrt())
    if length == 0:
        return None
    return float(products[0]) / length
