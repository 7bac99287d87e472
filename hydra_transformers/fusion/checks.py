"""Checks of models and members: whether a model is what its class says, and whether members can be fused.

A Hydra takes over weights and config alone, so a model that computes something else is refused.
"""

import copy
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.configuration_hydra import HydraConfigMixin
from .blending import cosines
from .structure import Member, have_equal_tensors, member_fields, outline, slots, tower_configs


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here too.
logger = logging.get_logger(f"transformers.{__name__}")

# Packages whose forwards a Hydra reproduces, and whose hooks only record outputs or move tensors between devices.
FORWARDS_OF = ("torch", "transformers", "transformers_modules", "hydra_transformers", "accelerate")
HOOKS_OF = ("transformers", "accelerate")
# Attributes that weights show by their shapes, that old head pruning changes, or that only training and losses read.
NOT_COMPARED = {
    *("all_head_size", "embed_dim", "dim", "in_features", "out_features", "num_embeddings", "vocab_size"),
    *("n_heads", "num_attention_heads", "num_heads", "num_labels", "padding_idx", "loss_type", "name_or_path"),
    *("gradient_checkpointing", "training", "attn_implementation"),
}
# Parameters that no answer depends on: poolers that the task does not use, and tokens that hide patches in pre-training.
UNUSED = ("pooler", "mask_token")
# Config fields in which members may differ: they say how a member was made or trains, not what it computes.
OWN_FIELDS = {*HydraConfigMixin.__annotations__, "use_cache", "tie_word_embeddings", "encoder_stride"}
OWN_FIELDS -= {"predicts_variance"}
OWN_KINDS = ("dropout", "drop_path", "initializer", "_init_value", "layerscale_value", "_out_", "reshape_hidden")
# "is_causal" is no field of any class, but Transformers reads it from every config that has it.
COMMON_FIELDS = ("is_causal", "num_labels", "id2label", "problem_type")
# What to do about members that differ in a field; else they are of different backbones.
CHOICES = {
    "problem_type": "set it alike in their configs",
    "predicts_variance": "call with_variance for all of them, or for none",
}
# Networks trained apart have a cosine near 0, fine-tunings of one model near 1.
LITTLE_IN_COMMON = 0.5


# Models


def check_is_in_memory(model: PreTrainedModel, name: str) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{name} has weights that are not in memory (offloaded, or on the meta device): load it whole"
        )


def check_is_not_quantised(model: PreTrainedModel, name: str) -> None:
    """Refuses weights that are codes for numbers, or shards of them: they would be read as the numbers themselves."""
    encoded = next((key for key, tensor in model.named_parameters() if not is_plain(tensor)), None)
    if encoded is not None or getattr(model, "is_quantized", False):
        where = ""
        if encoded is not None:
            weight = model.get_parameter(encoded)
            kind = type(weight.data)
            where = f": {encoded} is {weight.dtype if kind is torch.Tensor else f'a {kind.__name__}'}"
        raise ValueError(
            f"{name} ({type(model).__name__}) is quantised or sharded{where}: load it without, or pass "
            "model.dequantize()"
        )


def is_plain(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a plain tensor of floating-point numbers of at least 16 bits."""
    return parameter.is_floating_point() and parameter.element_size() > 1 and type(parameter.data) is torch.Tensor


def check_computes_as_its_class(cls: type, model: PreTrainedModel, name: str) -> None:
    """Refuses hooks, custom forwards, and parts or settings that differ from a new model of this class and config.

    cls: the Hydra class that is to be built from `model`
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        _check_hooks_and_forward(module, path, name)
    for path, expected in _new_model(cls, model).named_modules(remove_duplicate=False):
        if path.partition(".")[0] != "decision":  # added by calibration, and left out by fusion
            _check_same_part(modules.get(path), expected, path, name, type(model))


def check_is_all_read(cls: type, model: PreTrainedModel, read: Iterable[str], name: str) -> None:
    """Refuses a backbone with parameters that were not read: they would be lost."""
    known = set(read)
    for key, _ in model.named_parameters():
        if key not in known and not key.startswith(cls.unread) and not any(part in key for part in UNUSED):
            raise ValueError(
                f"{name} ({type(model).__name__}) has the parameter {key!r}, which {cls.__name__} does not know and would leave "
                "out: merge or remove what was added to the model"
            )


def _new_model(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """A model without weights of the same class and config, as Transformers (or the code of a Hydra) makes it."""
    model_class = next((each for each in type(model).__mro__ if each in cls.backbone_classes), type(model))
    options = {}
    if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        options["add_pooling_layer"] = getattr(model, "pooler", None) is not None
    config = model.config
    if getattr(config, "decision", None) is not None:
        config = copy.copy(config)
        config.decision = None
    return outline(model_class, config, **options)


def _check_hooks_and_forward(module: nn.Module, path: str, name: str) -> None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if _package_of(hook) not in HOOKS_OF:
            raise ValueError(
                f"{name} has a forward hook on {path or 'itself'} ({_name_of(hook)}), which its Hydra would not have: remove it "
                "(handle.remove(), or leave the block that added it)"
            )
    own = vars(module).get("forward")
    forward = type(module).forward if own is None or hasattr(module, "_hf_hook") else own
    if _package_of(forward) not in FORWARDS_OF:
        raise ValueError(
            f"{name} has a forward of its own ({_name_of(forward)} of {_module_of(forward)}, in {path or type(module).__name__}), "
            "and a Hydra computes what the classes of Transformers compute: pass the weights in a model of those"
        )


def _kind_of(module: nn.Module | None) -> type:
    """The class of a module; each with parametrised weights has one of its own, so of these the class before."""
    return type(module) if module is None else type_before_parametrizations(module)


def _check_same_part(module: nn.Module | None, expected: nn.Module, path: str, name: str, model_class: type) -> None:
    new = f"a new {model_class.__name__} of its config"
    # The model itself may be of a subclass: its forward was checked.
    if not (isinstance(module, type(expected)) if path == "" else _kind_of(module) is _kind_of(expected)):
        found = "nothing" if module is None else f"a {type(module).__name__}"
        raise ValueError(
            f"{name} has {found} at {path}, where {new} has a {type(expected).__name__}: merge or undo what was replaced "
            "(or put the config right), so that its Hydra computes the same"
        )
    if "drop" in type(expected).__name__.lower():
        return
    for key, value in vars(expected).items():
        if key in NOT_COMPARED or key.startswith("_") or "drop" in key:
            continue
        found = vars(module).get(key)
        if not _is_same_setting(found, value):
            shown = [_name_of(each) if callable(each) else repr(each) for each in (found, value)]
            raise ValueError(
                f"{name} has {'.'.join(filter(None, (path, key)))} = {shown[0]}, where {new} has {shown[1]}: set both alike, "
                "so that its Hydra computes the same"
            )


def _is_same_setting(found: Any, expected: Any) -> bool:
    """Compares numbers, texts and functions; anything else counts as the same."""
    if inspect.isroutine(expected):
        return getattr(found, "__func__", found) == getattr(expected, "__func__", expected)
    if isinstance(expected, partial):
        return isinstance(found, partial) and (found.func, found.keywords) == (expected.func, expected.keywords)
    if isinstance(expected, (bool, int, float, str, tuple)):
        return type(found) is type(expected) and found == expected
    return True


def _package_of(function: Callable) -> str:
    return _module_of(function).partition(".")[0]


def _module_of(function: Callable) -> str:
    """The module that defines a function."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__module__", None) or type(function).__module__


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


# Members


def check_shapes_and_dtypes(cls: type, member: Member) -> None:
    """Refuses tensors of other shapes than the config asks for, and of several dtypes: a Hydra has one."""
    for name, parameter in outline(cls, member.config).named_parameters():
        if name not in member.tensors:
            raise ValueError(
                f"{member.name} has no parameter {name!r}: it was changed after it was made (quantised, or a part "
                "replaced), pass it as it was before"
            )
        if member.tensors[name].shape != parameter.shape:
            raise ValueError(
                f"{member.name}: {name} has the shape {tuple(member.tensors[name].shape)}, its config asks for "
                f"{tuple(parameter.shape)}"
            )
    first, expected = next((name, tensor.dtype) for name, tensor in member.tensors.items())
    for name, tensor in member.tensors.items():
        if tensor.dtype != expected:
            raise ValueError(
                f"{member.name} has weights of several dtypes ({first} is {expected}, {name} is {tensor.dtype}): "
                f"convert it to one, with model.to({expected})"
            )


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
            instead = CHOICES.get(field, "all members must come from one backbone")
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
