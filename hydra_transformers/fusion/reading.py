"""Reads members out of backbones and Hydras."""

import re
from collections.abc import Callable, Container, Iterator

from transformers import PreTrainedModel

from ..models.backbone_rules import Rule, backbone_rules, backbone_types
from .checks import check_can_be_read, check_has_no_hooks, check_is_all_read, check_shapes_and_dtypes
from .structure import Member, config_in_backbone, hydra_config, member_fields, outline, slots, without_head


def read_members(cls: type, model: PreTrainedModel, name: str) -> list[Member]:
    """The members that a model holds, for building a `cls` from them.

    name: what errors call the model
    """
    if not hasattr(model, "config"):
        raise TypeError(f"{name} is a {type(model).__name__}: pass a model of Transformers, or a Hydra")
    model_type = model.config.model_type
    if model_type not in (*backbone_types(cls), cls.config_class.model_type):
        raise ValueError(
            f"{name} is a {type(model).__name__} ({model_type}): {cls.__name__} takes {' or '.join(backbone_types(cls))} models"
        )
    check_can_be_read(model, name)
    model = without_head(cls, model)
    check_has_no_hooks(model, name)
    is_hydra = model_type == cls.config_class.model_type
    members = _read_hydra(cls, model, name) if is_hydra else [_read_backbone(cls, model, name)]
    for member in members:
        check_shapes_and_dtypes(cls, member)
    return members


def _read_hydra(cls: type, model: PreTrainedModel, name: str) -> list[Member]:
    members = []
    for index in range(model.config.num_members):
        tensors = {}
        for parameter, slot in slots(model):
            tensor = model.get_parameter(parameter).detach()
            if slot.rows is not None:
                tensors[slot.name] = tensor.split(slot.rows)[min(index, len(slot.rows) - 1)]
            elif slot.member in (None, index):
                tensors[slot.name] = tensor
        fields = member_fields(model.config, index)
        config = hydra_config(cls.config_class, model.config, fields, **_pooler_field(cls, model))
        member_name = name if model.config.num_members == 1 else f"{name}.member({index})"
        members.append(Member(member_name, config, tensors))
    return members


def _read_backbone(cls: type, model: PreTrainedModel, name: str) -> Member:
    parameters = {key: tensor.detach() for key, tensor in model.named_parameters()}
    dense, source = dense_outline(cls, model), config_in_backbone(cls, model.config)
    tensors, read = {}, set()
    for parameter, slot in slots(dense):
        theirs, transform = backbone_source(cls, parameter, parameters)
        read.update(theirs)
        missing = next((key for key in theirs if key not in parameters), None)
        if missing is not None:
            raise ValueError(
                f"{name} ({type(model).__name__}) has no parameter {missing!r}, which {cls.__name__} needs: pass the "
                "backbone's model for the same task"
            )
        tensor = transform(*(parameters[key] for key in theirs))
        tensors[slot.name] = tensor.unsqueeze(0) if parameter in cls.per_member_parameters else tensor
    check_is_all_read(cls, model, read, name)
    config = hydra_config(cls.config_class, source, **_pooler_field(cls, model))
    if not model._supports_sdpa:
        config._attn_implementation = None  # eager was the only option, not a choice: let the Hydra pick
    return Member(name, config, tensors)


def _pooler_field(cls: type, model: PreTrainedModel) -> dict[str, bool]:
    """The config field that says whether a base model has a pooler; a model with a head writes it when it is saved."""
    if not hasattr(cls.config_class, "add_pooling_layer"):
        return {}
    if not cls.is_base_model:
        return {"add_pooling_layer": True}
    return {"add_pooling_layer": getattr(model, "pooler", None) is not None}


# Names of backbones


def dense_outline(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """A `cls` of `model` with all heads and without weights: read it, never change it."""
    config = config_in_backbone(cls, model.config)
    return outline(cls, hydra_config(cls.config_class, config, **_pooler_field(cls, model)))


def backbone_names(cls: type, model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """For each parameter of a `cls` built from `model`, the names of the backbone's parameters that it is made from."""
    theirs = dict(model.named_parameters())
    return {name: backbone_source(cls, name, theirs)[0] for name, _ in dense_outline(cls, model).named_parameters()}


def backbone_source(cls: type, name: str, parameters: Container[str]) -> tuple[tuple[str, ...], Callable]:
    """The backbone's names for our parameter `name`, and the function from their tensors to ours."""
    sources = [(theirs, rule.transform) for rule in backbone_rules(cls) if (theirs := _apply_rule(rule, name))]
    sources = sources or [((name,), lambda tensor: tensor)]
    return next((source for source in sources if all(theirs in parameters for theirs in source[0])), sources[0])


def _apply_rule(rule: Rule, name: str) -> tuple[str, ...] | None:
    """The backbone's names for our parameter `name`; None where the rule is about other parameters."""
    pattern = re.escape(rule.ours).replace(r"\*", r"(.+?)")
    match = re.fullmatch(rf"(?P<prefix>|.*\.){pattern}", name)
    if match is None:
        return None
    names = []
    for theirs in (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs:
        # Their name may have fewer places than ours: a scale has no weight and bias.
        first, *rest = theirs.split("*")
        names.append(match["prefix"] + first + "".join(map("".join, zip(match.groups()[1:], rest, strict=False))))
    return tuple(names)


def projection_names(cls: type) -> Iterator[tuple[str, ...]]:
    """What the backbones of a Hydra class call query, key, value and output inside a layer, for each version of Transformers
    with rules of its own. The first three are the same where they are one map."""
    rules = [rule for rule in backbone_rules(cls) if rule.ours.startswith("layers.*.attention.")]
    joint = [rule.theirs for rule in rules if rule.ours.endswith("qkv_proj.*")]
    outputs = [rule.theirs[:1] for rule in rules if rule.ours.endswith("o_proj.weight")]
    for qkv, output in zip(joint, outputs, strict=True):
        qkv = qkv * 3 if len(qkv) == 1 else qkv
        names = (name.partition(".*.")[2] for name in (*qkv, *output))
        yield tuple(name.removesuffix(".*").removesuffix(".weight") for name in names)
