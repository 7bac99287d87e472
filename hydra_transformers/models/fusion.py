"""From backbones to members to a fused Hydra, and back: the constructors that all model families share."""

import copy
import math
import re
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights
from transformers.utils import logging

from .attention import HydraAttention
from .checkpoints import CheckpointMixin
from .configuration_hydra import SHARED_PARTS, check_shared, keep_after_pruning
from .grouped import Grouped, PerMember


# Below Transformers' own logger, so that `transformers.logging.set_verbosity_error()` counts here too.
logger = logging.get_logger(f"transformers.{__name__}")

# Config fields that a member may have its own way: they say how it was made or is trained, not what it computes.
OWN_FIELDS = {
    "use_cache",
    "tie_word_embeddings",
    "encoder_stride",
    "kept_heads",
    "shared",
    "ensemble_loss",
    "fast_inference",
}
OWN_KINDS = ("dropout", "drop_path", "initializer", "_init_value", "layerscale_value", "_out_", "reshape_hidden")
LABEL_FIELDS = ("num_labels", "id2label", "problem_type")


@dataclass(frozen=True)
class Rule:
    """Where parameters of a one-member Hydra are found in a backbone.

    ours, theirs: names with `*` for what both have in their places, the number of the layer for example. Of several of
        theirs, `transform` makes one tensor
    transform: from theirs to ours; by default they are the same
    """

    ours: str
    theirs: str | tuple[str, ...]
    transform: Callable[..., torch.Tensor] = lambda tensor: tensor

    def found_in(self, name: str) -> tuple[str, ...] | None:
        """The backbone's names for our parameter `name`; None where the rule says nothing about it."""
        pattern = re.escape(self.ours).replace(r"\*", r"(.+?)")
        match = re.fullmatch(rf"(?P<prefix>|.*\.){pattern}", name)
        if match is None:
            return None
        places = match.groups()[1:]
        theirs = (self.theirs,) if isinstance(self.theirs, str) else self.theirs
        return tuple(match["prefix"] + _filled_in(each, places) for each in theirs)


def _filled_in(pattern: str, places: Sequence[str]) -> str:
    # Their name may have fewer places than ours: a scale has no weight and bias.
    first, *rest = pattern.split("*")
    return first + "".join(place + part for place, part in zip(places, rest, strict=False))


def attention_rules(theirs: str, projections: Sequence[str], scale: str | None = None) -> tuple[Rule, ...]:
    """The rules for a layer's attention.

    theirs: the name of one of its projections, with `*` for the number of the layer and `{}` for
    projections: the four names of query, key, value and output
    scale: the name of the factor on the attention's result, where a family has one: it becomes part of the output
    """
    query, key, value, output = (theirs.format(projection) for projection in projections)
    factor = () if scale is None else (scale,)
    return (
        Rule("layers.*.attention.qkv_proj.*", (f"{query}.*", f"{key}.*", f"{value}.*"), lambda *qkv: torch.cat(qkv)),
        Rule("layers.*.attention.o_proj.weight", (f"{output}.weight", *factor), lambda *weight: scaled(*weight).t()),
        Rule("layers.*.attention.o_proj.bias", (f"{output}.bias", *factor), lambda *bias: scaled(*bias).unsqueeze(0)),
    )


def projection_names(cls: type) -> Iterator[tuple[str, ...]]:
    """What the backbones of a Hydra class call query, key, value and output inside a layer; for every version of
    Transformers that has rules of its own."""
    rules = [rule for rule in cls.backbone_rules if rule.ours.startswith("layers.*.attention.")]
    joint = [rule.theirs for rule in rules if rule.ours.endswith("qkv_proj.*")]
    outputs = [rule.theirs[:1] for rule in rules if rule.ours.endswith("o_proj.weight")]
    for qkv, output in zip(joint, outputs, strict=True):
        names = (name.partition(".*.")[2] for name in (*qkv, *output))
        yield tuple(name.removesuffix(".*").removesuffix(".weight") for name in names)


def scaled(tensor: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A linear map's weight or bias with a factor on each of its outputs."""
    if scale is None:
        return tensor
    return tensor * (scale.unsqueeze(1) if tensor.dim() == 2 else scale)


@dataclass(frozen=True)
class Member:
    """One member as it was read: the config and the tensors of a one-member Hydra. The tensors are views."""

    name: str
    config: PreTrainedConfig
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """Where a parameter of a fused model belongs in its members.

    name: the parameter's name in a one-member Hydra
    member: the only member it belongs to, for a part that is not shared
    rows: how many rows each member owns, for a packed parameter
    A slot with neither belongs to all members: it is shared.
    """

    name: str
    member: int | None = None
    rows: list[int] | None = None


class HydraModelMixin(CheckpointMixin):
    """`from_backbone`, `from_pruned_members` and `member` for every Hydra model.

    A model family sets
    - `backbone_types`: the `model_type` of the Transformers models it is built from, and `backbone_classes` their classes,
    - `backbone_rules`: where parameters are found whose names or shapes differ from the backbone's; of several rules for
      one parameter, the first whose names the backbone has,
    - `architecture`: its name, as people call it,
    - `per_member_parameters`: bare parameters with one row per member,
    - `is_base_model`: on the class without a head, which then takes what it needs from a model with one.
    """

    backbone_types: tuple[str, ...] = ()
    backbone_classes: tuple[type, ...] = ()
    backbone_rules: tuple[Rule, ...] = ()
    per_member_parameters: tuple[str, ...] = ()
    is_base_model: bool = False

    @property
    def num_members(self) -> int:
        return self.config.num_members

    @classmethod
    def can_share_text_tower(cls, members: list["Member"]) -> bool:
        """Whether a tower beside the vision tower is the same in all members and can exist once."""
        return False

    @classmethod
    def from_backbone(cls, model: PreTrainedModel, heads_to_prune: dict | None = None):
        """A one-member Hydra from a Transformers model, with `heads_to_prune` cut out.

        model: the backbone, or a one-member Hydra to prune further; it is left as it is
        heads_to_prune: `{layer: [heads]}`; for CLIP `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`
        """
        members = list(read_members(cls, model, "model"))
        if len(members) != 1:
            raise ValueError(f"from_backbone got a Hydra of {len(members)} members: pass one of them, model.member(i)")
        return build(cls, [prune(cls, members[0], heads_to_prune)], SHARED_PARTS)

    @classmethod
    def from_pruned_members(cls, members: Sequence[PreTrainedModel], shared: Sequence[str] = SHARED_PARTS):
        """Fuses members into one Hydra.

        members: one-member Hydras, Hydras (their members are taken apart), or Transformers models, whole or with
            their q, k, v and output projections sliced; all from one backbone. They are left as they are
        shared: the parts that become the mean over the members, of "embeddings", "layernorm" and "mlp"; with `()`
            nothing is merged and the Hydra is exactly the ensemble of the members
        """
        if isinstance(members, nn.Module):
            raise TypeError(f"members is a {type(members).__name__}: pass a list of members")
        check_shared(shared)
        read = [
            member
            for position, model in enumerate(members)
            for member in read_members(cls, model, f"members[{position}]")
        ]
        if not read:
            raise ValueError("members is empty: pass at least one model")
        for member in read:
            check_agrees(member, read[0])
            check_finite(member)
        hydra = build(cls, read, shared)
        warn_of_strangers(hydra, read)
        return hydra

    def member(self, index: int):
        """Member `index` as a one-member Hydra of its own; shared parts are copied into it."""
        if not -self.num_members <= index < self.num_members:
            raise IndexError(f"member {index} does not exist: this Hydra has members 0 to {self.num_members - 1}")
        members = list(read_members(type(self), self, type(self).__name__))
        return build(type(self), [members[index]], SHARED_PARTS)


def tower_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configs that carry `kept_heads`, by tower: {"": config}, or {"vision": ..., "text": ...} for two towers."""
    if hasattr(config, "vision_config"):
        return {"vision": config.vision_config, "text": config.text_config}
    return {"": config}


def is_a(module: nn.Module, kind: type) -> bool:
    """Whether a module is of one of our classes, whichever copy of the code it comes from.

    Each repository that is loaded with `trust_remote_code` brings classes of its own, which `isinstance` tells apart from
    those of other repositories and of the installed package.
    """
    return any(each.__name__ == kind.__name__ for each in type(module).__mro__)


def attention_names(model: nn.Module) -> dict[str, list[str]]:
    """Names of the fused attentions in the order of the layers, by tower."""
    names = {tower: [] for tower in tower_configs(model.config)}
    for name, module in model.named_modules():
        if is_a(module, HydraAttention):
            tower = next(tower for tower, config in tower_configs(model.config).items() if config is module.config)
            names[tower].append(name)
    return names


def slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """(name, slot) of every parameter of a Hydra."""
    modules = dict(model.named_modules())
    split_parts = [name for name, module in modules.items() if is_a(module, PerMember)]
    for name, _ in model.named_parameters():
        owner, _, parameter = name.rpartition(".")
        part = next((part for part in split_parts if name.startswith(f"{part}.")), None)
        if part is not None:
            index, _, rest = name.removeprefix(f"{part}.").partition(".")
            yield name, Slot(f"{part}.{rest}", member=int(index))
        elif is_a(modules[owner], Grouped):
            yield name, Slot(name, rows=modules[owner].member_rows(parameter))
        elif name in model.per_member_parameters:
            yield name, Slot(name, rows=[1] * model.num_members)
        else:
            yield name, Slot(name)


# Reading


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
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            f"{name} has weights that are not in memory (offloaded, or on the meta device): load it whole"
        )
    check_is_not_quantised(model, name)
    if cls.is_base_model:
        model = model.base_model
    if model_type == cls.config_class.model_type:
        yield from _read_hydra(cls, model, name)
    else:
        yield _read_backbone(cls, model, name)


def check_has_no_adapters(model: nn.Module, name: str) -> None:
    """Refuses a model with adapters of PEFT, whose weights are not yet those that it computes with."""
    if not isinstance(model, nn.Module):
        return  # the caller says what is wrong with it
    if any(type(module).__module__.split(".")[0] == "peft" for module in model.modules()):
        raise ValueError(
            f"{name} ({type(model).__name__}) has adapters of PEFT: pass what merge_and_unload() of its PeftModel returns"
        )


def check_is_not_quantised(model: PreTrainedModel, name: str) -> None:
    """Refuses weights that are codes for other numbers, or parts of them: they would be read as the numbers themselves."""
    encoded = next((key for key, tensor in model.named_parameters() if not _holds_its_numbers(tensor)), None)
    if encoded is not None or getattr(model, "is_quantized", False):
        where = "" if encoded is None else f": {encoded} is {_kind_of(model.get_parameter(encoded))}"
        raise ValueError(
            f"{name} ({type(model).__name__}) is quantised or sharded{where}: load it without, or pass "
            "model.dequantize()"
        )


def _holds_its_numbers(parameter: nn.Parameter) -> bool:
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
        config = hydra_config(cls.config_class, model.config, kept, SHARED_PARTS, **_has_pooler(cls, model))
        yield _checked(cls, Member(name if members == 1 else f"{name}.member({index})", config, tensors))


def _read_backbone(cls: type, model: PreTrainedModel, name: str) -> Member:
    parameters = {key: tensor.detach() for key, tensor in model.named_parameters()}
    pooler = _has_pooler(cls, model)
    dense = without_weights(cls, hydra_config(cls.config_class, model.config, None, SHARED_PARTS, **pooler))
    kept = {
        tower: [[_heads_left(cls, dense, model, parameters, tower, layer, name)] for layer in range(len(attentions))]
        for tower, attentions in attention_names(dense).items()
    }
    tensors = {}
    for parameter, slot in slots(dense):
        theirs, transform = backbone_source(cls, parameter, parameters)
        missing = next((each for each in theirs if each not in parameters), None)
        if missing is not None:
            raise ValueError(
                f"{name} ({type(model).__name__}) has no parameter {missing!r}, which {cls.__name__} needs: pass the "
                "backbone's model for the same task"
            )
        tensor = transform(*(parameters[each] for each in theirs))
        tensors[slot.name] = tensor.unsqueeze(0) if parameter in cls.per_member_parameters else tensor
    config = hydra_config(cls.config_class, model.config, kept, SHARED_PARTS, **pooler)
    return _checked(cls, Member(name, config, tensors))


def backbone_source(cls: type, name: str, parameters: Container[str]) -> tuple[tuple[str, ...], Callable]:
    """The backbone's names for our parameter `name`, and what makes ours of theirs."""
    found = [(rule.found_in(name), rule.transform) for rule in cls.backbone_rules]
    found = [(theirs, transform) for theirs, transform in found if theirs is not None]
    for theirs, transform in found:
        if all(each in parameters for each in theirs):
            return theirs, transform
    return found[0] if found else ((name,), lambda tensor: tensor)


def backbone_names(cls: type, model: PreTrainedModel) -> dict[str, tuple[str, ...]]:
    """By name of a parameter of a `cls` made from `model`, the names of the backbone's parameters that it is made of."""
    pooler = _has_pooler(cls, model)
    dense = without_weights(cls, hydra_config(cls.config_class, model.config, None, SHARED_PARTS, **pooler))
    theirs = dict(model.named_parameters())
    return {name: backbone_source(cls, name, theirs)[0] for name, _ in dense.named_parameters()}


def _heads_left(cls, dense, model, parameters, tower: str, layer: int, name: str) -> list[int]:
    """The heads of a backbone's layer; sliced projections keep fewer than the config says."""
    ours = attention_names(dense)[tower][layer]
    attention = dense.get_submodule(ours)
    (theirs, *_), _ = backbone_source(cls, f"{ours}.qkv_proj.weight", parameters)
    if theirs not in parameters:
        raise ValueError(f"{name} ({type(model).__name__}) has no parameter {theirs!r}: pass an unmodified backbone")
    heads, remainder = divmod(parameters[theirs].shape[0], attention.head_dim)
    everything = attention.config.num_attention_heads
    if remainder or heads > everything:
        raise ValueError(
            f"{name}: {theirs} has {parameters[theirs].shape[0]} rows, which are no whole heads of {attention.head_dim}"
        )
    if heads == everything:
        return list(range(everything))
    recorded = getattr(tower_configs(model.config)[tower], "pruned_heads", None) or {}
    recorded = {int(key): heads_gone for key, heads_gone in recorded.items()}.get(layer, [])
    left = [head for head in range(everything) if head not in recorded]
    if len(left) == heads:
        return left
    logger.warning_once(
        f"{name} has sliced attention and no record of which heads are left (config.pruned_heads): its {heads} heads "
        f"of layer {layer} are numbered 0 to {heads - 1}, and so on in other layers."
    )
    return list(range(heads))


def hydra_config(
    config_class: type, config: PreTrainedConfig, kept: dict | None, shared: Sequence[str], **others
) -> PreTrainedConfig:
    """A backbone's or a Hydra's config as a `config_class` with these kept heads by tower (None: all of them)."""
    fields = config.to_dict() | others
    for tower in tower_configs(config):
        part = fields[f"{tower}_config"] if tower else fields
        part.pop("model_type", None)
        part["kept_heads"] = None if kept is None else kept[tower]
        part["shared"] = list(shared)
    for name in ("model_type", "architectures", "auto_map", "pruned_heads"):
        fields.pop(name, None)
    result = config_class(**fields)
    result._attn_implementation = config._attn_implementation
    return result


def _has_pooler(cls: type, model: PreTrainedModel) -> dict[str, bool]:
    """The field that says whether a base model has a pooler; models with a head do not ask."""
    return {"add_pooling_layer": getattr(model, "pooler", None) is not None} if cls.is_base_model else {}


def _checked(cls: type, member: Member) -> Member:
    """A member whose tensors all have the shape its config asks for."""
    expected = without_weights(cls, member.config)
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
    return member


def without_weights(model_class: type, config: PreTrainedConfig) -> PreTrainedModel:
    """A model on the meta device, to ask for names, shapes and counts and not to compute with."""
    with torch.device("meta"), no_init_weights():
        return model_class(copy.deepcopy(config)).eval()


# Pruning


def prune(cls: type, member: Member, heads_to_prune: dict | None) -> Member:
    """The member with heads cut out: q, k, v and o lose the heads' rows, the config their numbers."""
    heads_to_prune = _by_tower(member.config, heads_to_prune or {})
    tensors, kept = dict(member.tensors), {}
    empty = without_weights(cls, member.config)
    for tower, names in attention_names(empty).items():
        before = [layer[0] for layer in tower_configs(member.config)[tower].kept_heads]
        after = keep_after_pruning(before, heads_to_prune.get(tower))
        kept[tower] = [[heads] for heads in after]
        for layer, name in enumerate(names):
            if after[layer] != before[layer]:
                positions = [before[layer].index(head) for head in after[layer]]
                _keep_heads(tensors, name, positions, empty.get_submodule(name).head_dim)
    return Member(member.name, hydra_config(cls.config_class, member.config, kept, SHARED_PARTS), tensors)


def _by_tower(config: PreTrainedConfig, heads_to_prune: dict) -> dict[str, dict]:
    towers = list(tower_configs(config))
    if towers == [""]:
        return {"": heads_to_prune}
    if not isinstance(heads_to_prune, dict):
        raise TypeError(
            f"heads_to_prune is a {type(heads_to_prune).__name__}: pass {{'vision': {{...}}, 'text': {{...}}}}"
        )
    for tower in heads_to_prune:
        if tower not in towers:
            raise ValueError(f"heads_to_prune names {tower!r}: pass {{'vision': {{...}}, 'text': {{...}}}}")
    return heads_to_prune


def _keep_heads(tensors: dict[str, torch.Tensor], attention: str, positions: list[int], head_dim: int) -> None:
    """Leaves only the heads at `positions` of one attention's packed tensors."""
    for parameter in ("qkv_proj.weight", "qkv_proj.bias"):
        if f"{attention}.{parameter}" in tensors:
            tensors[f"{attention}.{parameter}"] = heads_at(tensors[f"{attention}.{parameter}"], positions, head_dim, 3)
    tensors[f"{attention}.o_proj.weight"] = heads_at(tensors[f"{attention}.o_proj.weight"], positions, head_dim)


def heads_at(tensor: torch.Tensor, positions: Sequence[int], head_dim: int, projections: int = 1) -> torch.Tensor:
    """The rows of the heads at `positions`, of each projection: (projections * heads * head_dim, ...)"""
    index = torch.tensor(positions, dtype=torch.long, device=tensor.device)
    return tensor.unflatten(0, (projections, -1, head_dim)).index_select(1, index).flatten(0, 2)


# Fusing


def build(cls: type, members: list[Member], shared: Sequence[str]) -> PreTrainedModel:
    """A `cls` that holds the members: packed where each has its own rows, averaged where they share."""
    towers = tower_configs(members[0].config)
    kept = {}
    for tower in towers:
        of_members = [tower_configs(member.config)[tower].kept_heads for member in members]
        layers = range(len(of_members[0]))
        kept[tower] = [[heads[layer][0] for heads in of_members] for layer in layers]
    if cls.can_share_text_tower(members):
        kept["text"] = [layer[:1] for layer in kept["text"]]

    reference = next(iter(members[0].tensors.values()))
    config = hydra_config(cls.config_class, members[0].config, kept, shared)
    for part in (config, *tower_configs(config).values()):
        part.dtype = reference.dtype
    with torch.device(reference.device), no_init_weights(), default_dtype(reference.dtype):
        model = cls(config)
    with torch.no_grad():
        for name, slot in slots(model):
            _fill(model.get_parameter(name), slot, members)
    return model.eval()


def warn_of_strangers(model: PreTrainedModel, members: list[Member]) -> None:
    """Tells of members whose shared matrices point elsewhere than the first one's: their mean works like neither of them."""
    shared = [slot.name for _, slot in slots(model) if slot.member is None and slot.rows is None]
    matrices = [name for name in shared if members[0].tensors[name].dim() > 1]
    for member in members[1:]:
        products = [0.0, 0.0, 0.0]
        for name in matrices:
            a, b = (each.tensors[name].flatten().float() for each in (members[0], member))
            b = b.to(a.device)
            of_matrix = torch.stack([a @ b, a @ a, b @ b]).tolist()
            products = [total + product for total, product in zip(products, of_matrix, strict=True)]
        if not all(products[1:]):
            continue  # nothing that is shared, or nothing but zeros
        similarity = products[0] / math.sqrt(products[1] * products[2])
        if similarity < 0.5:
            logger.warning(
                f"{member.name} has little in common with {members[0].name} (cosine similarity {similarity:.2f} of what they "
                "share), and the mean of networks trained apart is neither of them: pass members of one backbone, or "
                "shared=() to keep each whole"
            )


def _fill(parameter: torch.Tensor, slot: Slot, members: list[Member]) -> None:
    if slot.member is not None:
        parameter.copy_(members[slot.member].tensors[slot.name])
    elif slot.rows is not None:
        for rows, member in zip(parameter.split(slot.rows), members, strict=False):
            rows.copy_(member.tensors[slot.name])
    elif len(members) == 1:
        parameter.copy_(members[0].tensors[slot.name])
    else:
        # In float64, the mean of equal tensors is bit for bit that tensor.
        device = "cpu" if parameter.device.type == "mps" else parameter.device  # MPS has no float64
        total = torch.zeros(parameter.shape, dtype=torch.float64, device=device)
        for member in members:
            total += member.tensors[slot.name].to(device)
        parameter.copy_(total / len(members))


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
    return [name for name in own if not any(kind in name for kind in OWN_KINDS)] + list(LABEL_FIELDS)


def _short(value) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_finite(member: Member) -> None:
    for name, tensor in member.tensors.items():
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{member.name}: {name} has NaN or infinite values: this member cannot be fused")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New parameters have this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
