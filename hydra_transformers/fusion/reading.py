"""Reads members out of backbones and Hydras."""

import re
from collections.abc import Callable, Container, Iterator

from transformers import PreTrainedModel

from ..models.backbone_rules import Rule, backbone_rules, backbone_types
from .checks import check_can_be_read, check_has_no_hooks, check_is_all_read, check_shapes_and_dtypes
from .structure import Member, config_in_backbone, hydra_config, member_fields, outline, slots, without_head


def read_members(cls: type, model: PreTrainedModel, name: str) -> list[Member]:
    """Return the members that a model holds, for building a `cls` from them.

    name: what errors call the model
    """
    if not hasattr(model, "config"):
        raise TypeError(f"{name} is a {type(model).__name__}: pass a model of Transformers, or a Hydra")
    model_type = model.config.model_type
    if model_type not in (*backbone_types(cls), cls.config_class.model_type):
        raise ValueError(
            f"{name} is a {type(model).__name__} ({model_type}): {cls.__name__} takes "
            f"{' or '.join(backbone_types(cls))} models"
        )
    check_can_be_read(model, name)
    model = without_head(cls, model)
    check_has_no_hooks(model, name)
    if model_type == cls.config_class.model_type:
        members = _read_hydra(cls, model, name)
    else:
        members = [_read_backbone(cls, model, name)]
    for member in members:
        check_shapes_and_dtypes(cls, member)
    return members


def _read_hydra(cls: type, model: PreTrainedModel, name: str) -> list[Member]:
    members = []
    for index in range(model.config.num_members):
        # Its rows of packed parameters, its own parameters, and the shared ones.
        tensors = {}
        for parameter, slot in slots(model):
            tensor = model.get_parameter(parameter).detach()
            if slot.rows is not None:
                part = min(index, len(slot.rows) - 1)  # a tower with one member serves all
                tensors[slot.name] = tensor.split(slot.rows)[part]
            elif slot.member in (None, index):
                tensors[slot.name] = tensor

        fields = member_fields(model.config, index)
        config = hydra_config(cls.config_class, model.config, fields, **_pooler_field(cls, model))
        member_name = name if model.config.num_members == 1 else f"{name}.member({index})"
        members.append(Member(member_name, config, tensors))
    return members


def _read_backbone(cls: type, model: PreTrainedModel, name: str) -> Member:
    parameters = {key: tensor.detach() for key, tensor in model.named_parameters()}

    # Each of our parameters from the backbone's.
    tensors = {}
    read = set()
    for parameter, slot in slots(dense_outline(cls, model)):
        theirs, transform = backbone_source(cls, parameter, parameters)
        read.update(theirs)
        missing = [key for key in theirs if key not in parameters]
        if missing:
            raise ValueError(
                f"{name} ({type(model).__name__}) has no parameter {missing[0]!r}, which {cls.__name__} needs: pass "
                "the backbone's model for the same task"
            )
        tensor = transform(*[parameters[key] for key in theirs])
        if parameter in cls.per_member_parameters:
            tensor = tensor.unsqueeze(0)
        tensors[slot.name] = tensor
    check_is_all_read(cls, model, read, name)

    # The config.
    source = config_in_backbone(cls, model.config)
    config = hydra_config(cls.config_class, source, **_pooler_field(cls, model))
    if not model._supports_sdpa:
        config._attn_implementation = None  # eager was the only option, not a choice: let the Hydra pick
    return Member(name, config, tensors)


def _pooler_field(cls: type, model: PreTrainedModel) -> dict[str, bool]:
    """Return the config field that says whether a base model has a pooler; a model with a head
    writes it when it is saved."""
    if not hasattr(cls.config_class, "add_pooling_layer"):
        return {}
    if not cls.is_base_model:
        return {"add_pooling_layer": True}
    return {"add_pooling_layer": getattr(model, "pooler", None) is not None}


# Names of backbones


def dense_outline(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """Return a `cls` of `model` with all heads and without weights: read it, never change it."""
    config = config_in_backbone(cls, model.config)
    return outline(cls, hydra_config(cls.config_class, config, **_pooler_field(cls, model)))


def backbone_names(cls: type, model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """Return, for each parameter of a `cls` built from `model`, the names of the backbone's
    parameters that it is made from."""
    parameters = dict(model.named_parameters())
    names = {}
    for name, _ in dense_outline(cls, model).named_parameters():
        names[name], _ = backbone_source(cls, name, parameters)
    return names


def backbone_source(cls: type, name: str, parameters: Container[str]) -> tuple[tuple[str, ...], Callable]:
    """Return the backbone's names for our parameter `name`, and the function from their tensors to
    ours."""
    sources = []
    for rule in backbone_rules(cls):
        names = _apply_rule(rule, name)
        if names:
            sources.append((names, rule.transform))
    if not sources:
        sources = [((name,), lambda tensor: tensor)]

    # Versions of Transformers differ in names: the first source that the backbone has.
    for names, transform in sources:
        if all(theirs in parameters for theirs in names):
            return names, transform
    return sources[0]


def _apply_rule(rule: Rule, name: str) -> tuple[str, ...] | None:
    """Return the backbone's names for our parameter `name`; None where the rule is about other
    parameters."""
    pattern = re.escape(rule.ours).replace(r"\*", r"(.+?)")
    match = re.fullmatch(rf"(?P<prefix>|.*\.){pattern}", name)
    if match is None:
        return None
    prefix, *filled = match.groups()
    all_theirs = (rule.theirs,) if isinstance(rule.theirs, str) else rule.theirs
    names = []
    for theirs in all_theirs:
        # Their name may have fewer places than ours: a scale has no weight and bias.
        first, *rest = theirs.split("*")
        their_name = prefix + first
        for value, text in zip(filled, rest, strict=False):
            their_name += value + text
        names.append(their_name)
    return tuple(names)


def projection_names(cls: type) -> Iterator[tuple[str, ...]]:
    """Yield what the backbones of a Hydra class call query, key, value and output inside a layer,
    for each version of Transformers with rules of its own. The first three are the same where they
    are one map."""
    rules = [rule for rule in backbone_rules(cls) if rule.ours.startswith("layers.*.attention.")]
    joint = [rule.theirs for rule in rules if rule.ours.endswith("qkv_proj.*")]
    outputs = [rule.theirs for rule in rules if rule.ours.endswith("o_proj.weight")]
    for qkv, output in zip(joint, outputs, strict=True):
        if len(qkv) == 1:
            qkv = qkv * 3
        names = [name.partition(".*.")[2] for name in (*qkv, output)]
        yield tuple(name.removesuffix(".*").removesuffix(".weight") for name in names)
