"""Reading members out of backbones and Hydras."""

import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from ..models.auto import check_has_no_adapters
from ..models.configuration_hydra import SHARED_PARTS
from ..models.pretrained import Rule
from .backbone_checks import check_computes_as_its_class, check_is_all_read
from .structure import (
    attention_names,
    config_in_backbone,
    hydra_config,
    neurons_of_member,
    outline,
    slots,
    tower_configs,
)


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here too.
logger = logging.get_logger(f"transformers.{__name__}")


@dataclass(frozen=True)
class Member:
    """One member as it was read: the config and the tensors of a one-member Hydra. The tensors are views."""

    name: str
    config: PreTrainedConfig
    tensors: dict[str, torch.Tensor]


def read_members(cls: type, model: PreTrainedModel, name: str) -> Iterator[Member]:
    """The members that a model holds, for building a `cls` from them."""
    check_has_no_adapters(model, name)
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"{name} is a {type(model).__name__}: pass a Transformers or Hydra model")
    model_type = model.config.model_type
    if model_type not in (*cls.backbone_types, cls.config_class.model_type):
        raise ValueError(
            f"{name} is a {type(model).__name__} ({model_type}): {cls.__name__} is built from "
            f"{' or '.join(cls.backbone_types)} models"
        )
    check_is_in_memory(model, name)
    check_is_not_quantised(model, name)
    if cls.is_base_model:
        model = model.base_model
    is_hydra = model_type == cls.config_class.model_type
    members = list(_read_hydra(cls, model, name)) if is_hydra else [_read_backbone(cls, model, name)]
    check_computes_as_its_class(cls, model, name)
    yield from members


def check_is_in_memory(model: PreTrainedModel, name: str) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{name} has weights that are not in memory (offloaded, or on the meta device): load it whole"
        )


def check_is_not_quantised(model: PreTrainedModel, name: str) -> None:
    """Refuses weights that are codes for other numbers, or parts of them: they would be read as the numbers themselves."""
    encoded = next((key for key, tensor in model.named_parameters() if not holds_its_numbers(tensor)), None)
    if encoded is not None or getattr(model, "is_quantized", False):
        where = "" if encoded is None else f": {encoded} is {_kind_of(model.get_parameter(encoded))}"
        raise ValueError(
            f"{name} ({type(model).__name__}) is quantised or sharded{where}: load it without, or pass "
            "model.dequantize()"
        )


def holds_its_numbers(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a plain tensor of 16-bit floating-point numbers or longer."""
    return parameter.is_floating_point() and parameter.element_size() > 1 and type(parameter.data) is torch.Tensor


def _kind_of(parameter: nn.Parameter) -> str:
    kind = type(parameter.data)
    return str(parameter.dtype) if kind is torch.Tensor else f"a {kind.__name__}"


def _read_hydra(cls: type, model: PreTrainedModel, name: str) -> Iterator[Member]:
    members = model.config.num_members
    for index in range(members):
        tensors = {}
        for parameter, slot in slots(model):
            tensor = model.get_parameter(parameter).detach()
            if slot.rows is not None:
                tensors[slot.name] = tensor.split(slot.rows)[min(index, len(slot.rows) - 1)]
            elif slot.member in (None, index):
                tensors[slot.name] = tensor
        kept = {
            tower: [[layer[min(index, len(layer) - 1)]] for layer in config.kept_heads]
            for tower, config in tower_configs(model.config).items()
        }
        neurons = neurons_of_member(model.config, index)
        config = hydra_config(
            cls.config_class, model.config, kept, SHARED_PARTS, neurons=neurons, **_has_pooler(cls, model)
        )
        yield _checked(cls, Member(name if members == 1 else f"{name}.member({index})", config, tensors))


def _read_backbone(cls: type, model: PreTrainedModel, name: str) -> Member:
    parameters = {key: tensor.detach() for key, tensor in model.named_parameters()}
    dense = dense_outline(cls, model)
    kept = {
        tower: [[_heads_left(cls, dense, model, parameters, tower, layer, name)] for layer in range(len(attentions))]
        for tower, attentions in attention_names(dense).items()
    }
    tensors, read = {}, set()
    for parameter, slot in slots(dense):
        theirs, transform = backbone_source(cls, parameter, parameters)
        read.update(theirs)
        missing = next((each for each in theirs if each not in parameters), None)
        if missing is not None:
            raise ValueError(
                f"{name} ({type(model).__name__}) has no parameter {missing!r}, which {cls.__name__} needs: pass the "
                "backbone's model for the same task"
            )
        tensor = transform(*(parameters[each] for each in theirs))
        tensors[slot.name] = tensor.unsqueeze(0) if parameter in cls.per_member_parameters else tensor
    check_is_all_read(cls, model, read, name)
    own = config_in_backbone(cls, model.config)
    config = hydra_config(cls.config_class, own, kept, SHARED_PARTS, **_has_pooler(cls, model))
    if not model._supports_sdpa:
        config._attn_implementation = None  # eager was no choice: it is all that the backbone has
    return _checked(cls, Member(name, config, tensors))


def backbone_source(cls: type, name: str, parameters: Container[str]) -> tuple[tuple[str, ...], Callable]:
    """The backbone's names for our parameter `name`, and what makes ours of theirs."""
    found = [(_found_by(rule, name), rule.transform) for rule in cls.backbone_rules]
    found = [(theirs, transform) for theirs, transform in found if theirs is not None]
    for theirs, transform in found:
        if all(each in parameters for each in theirs):
            return theirs, transform
    return found[0] if found else ((name,), lambda tensor: tensor)


def _found_by(rule: Rule, name: str) -> tuple[str, ...] | None:
    """The backbone's names for our parameter `name`; None where the rule says nothing about it."""
    pattern = re.escape(rule.ours).replace(r"\*", r"(.+?)")
    match = re.fullmatch(rf"(?P<prefix>|.*\.){pattern}", name)
    if match is None:
        return None
    places = match.groups()[1:]
    theirs = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
    return tuple(match["prefix"] + _filled_in(each, places) for each in theirs)


def _filled_in(pattern: str, places: tuple[str, ...]) -> str:
    # Their name may have fewer places than ours: a scale has no weight and bias.
    first, *rest = pattern.split("*")
    return first + "".join(place + part for place, part in zip(places, rest, strict=False))


def dense_outline(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """A `cls` of `model` with all heads, without weights: to be read, never changed."""
    own = config_in_backbone(cls, model.config)
    return outline(cls, hydra_config(cls.config_class, own, None, SHARED_PARTS, **_has_pooler(cls, model)))


def backbone_names(cls: type, model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """By name of a parameter of a `cls` made from `model`, the names of the backbone's parameters that it is made of."""
    dense = dense_outline(cls, model)
    theirs = dict(model.named_parameters())
    return {name: backbone_source(cls, name, theirs)[0] for name, _ in dense.named_parameters()}


def _heads_left(cls, dense, model, parameters, tower: str, layer: int, name: str) -> list[int]:
    """The heads of a backbone's layer; sliced projections keep fewer than the config says."""
    ours = attention_names(dense)[tower][layer]
    attention = dense.get_submodule(ours)
    (theirs, *others), _ = backbone_source(cls, f"{ours}.qkv_proj.weight", parameters)
    if theirs not in parameters:
        raise ValueError(f"{name} ({type(model).__name__}) has no parameter {theirs!r}: pass an unmodified backbone")
    rows_of_head = (
        attention.head_dim if others else 3 * attention.head_dim
    )  # queries, or they and keys and values as one
    heads, remainder = divmod(parameters[theirs].shape[0], rows_of_head)
    everything = attention.config.num_attention_heads
    if remainder or heads > everything:
        raise ValueError(
            f"{name}: {theirs} has {parameters[theirs].shape[0]} rows, which are no whole heads of {rows_of_head}"
        )
    if heads == everything:
        return list(range(everything))
    recorded = getattr(tower_configs(config_in_backbone(cls, model.config))[tower], "pruned_heads", None) or {}
    recorded = {int(key): heads_gone for key, heads_gone in recorded.items()}.get(layer, [])
    left = [head for head in range(everything) if head not in recorded]
    if len(left) == heads:
        return left
    logger.warning_once(
        f"{name} has sliced attention and no record of which heads are left (config.pruned_heads): its {heads} heads "
        f"of layer {layer} are numbered 0 to {heads - 1}, and so on in other layers."
    )
    return list(range(heads))


def _has_pooler(cls: type, model: PreTrainedModel) -> dict[str, bool]:
    """The field that says whether a base model has a pooler; models with a head do not ask."""
    if not cls.is_base_model or not hasattr(cls.config_class, "add_pooling_layer"):
        return {}
    return {"add_pooling_layer": getattr(model, "pooler", None) is not None}


def _checked(cls: type, member: Member) -> Member:
    """A member whose tensors all have the shape its config asks for."""
    expected = outline(cls, member.config)
    for name, parameter in expected.named_parameters():
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
    _check_one_dtype(member)
    return member


def _check_one_dtype(member: Member) -> None:
    """A Hydra has one dtype; weights of another would be rounded to it without a word."""
    first, *names = member.tensors
    expected = member.tensors[first].dtype
    for name in names:
        if member.tensors[name].dtype != expected:
            raise ValueError(
                f"{member.name} has weights of several dtypes ({first} is {expected}, {name} is {member.tensors[name].dtype}): "
                f"convert it to one, with model.to({expected})"
            )


def projection_names(cls: type) -> Iterator[tuple[str, ...]]:
    """What the backbones of a Hydra class call query, key, value and output inside a layer (the first three alike, where they
    are one map); for every version of Transformers that has rules of its own."""
    rules = [rule for rule in cls.backbone_rules if rule.ours.startswith("layers.*.attention.")]
    joint = [rule.theirs for rule in rules if rule.ours.endswith("qkv_proj.*")]
    outputs = [rule.theirs[:1] for rule in rules if rule.ours.endswith("o_proj.weight")]
    for qkv, output in zip(joint, outputs, strict=True):
        qkv = qkv * 3 if len(qkv) == 1 else qkv
        names = (name.partition(".*.")[2] for name in (*qkv, *output))
        yield tuple(name.removesuffix(".*").removesuffix(".weight") for name in names)
