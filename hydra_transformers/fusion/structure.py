"""The parts of a Hydra: its towers, their attentions, and which rows of its parameters belong to which member."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.auto import hydra_classes
from ..models.configuration_hydra import SHARED_PARTS, HydraConfigMixin, LayerScaleConfigMixin
from ..models.modeling_hydra import Grouped, GroupedOutput, HydraAttention, LayerScale, PerMember


# Config fields of a Hydra that its backbone does not have, or says otherwise by itself.
HYDRA_FIELDS = (
    *HydraConfigMixin.__annotations__,
    *LayerScaleConfigMixin.__annotations__,
    "is_encoder_decoder",
    *("add_pooling_layer", "custom_pipelines", "auto_map", "architectures", "model_type"),
)
CLASS_FIELDS = ("id2label", "label2id", "problem_type")
MAX_CACHED_OUTLINES = 16


# Configs


def tower_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configs that carry `kept_heads`, by tower: {"": config}, or {"vision": ..., "text": ...} for two towers."""
    if hasattr(config, "vision_config"):
        return {"vision": config.vision_config, "text": config.text_config}
    return {"": config}


def config_in_backbone(cls: type | None, config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a backbone's config that a `cls` is built from: all of it, or one tower's with the classes of the whole."""
    key = getattr(cls, "backbone_config_key", None)
    if key is None:
        return config
    part = copy.deepcopy(getattr(config, key))
    class_fields = {name: copy.deepcopy(getattr(config, name)) for name in CLASS_FIELDS}
    for name, value in (class_fields | cls.own_fields).items():
        setattr(part, name, value)
    return part


def number_of_layers(config: PreTrainedConfig) -> int:
    """How many layers of a backbone or a Hydra have weights of their own. Where groups of layers share them, that is one for
    each group, which runs again and again."""
    return getattr(config, "num_hidden_groups", config.num_hidden_layers)


def hydra_class_of(model: nn.Module) -> type | None:
    """The Hydra class that is built from a plain model; None for other models, Hydras among them."""
    return next((hydra for backbone, hydra in hydra_classes().items() if isinstance(model, backbone)), None)


def without_head(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """The part of a model that a `cls` is built from: its encoder, or all of it."""
    # The base model of an encoder can be a part of it, as for DINOv3.
    if not cls.is_base_model or isinstance(model, cls.backbone_classes):
        return model
    # The base model of a Whisper with a decoder is not its encoder, nor does Whisper's prefix name it.
    encoder = next((module for module in model.modules() if isinstance(module, cls.backbone_classes)), None)
    return model.base_model if encoder is None else encoder


def encoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config with the layers and heads of a plain model or a Hydra; of a classifier on one of two towers, that tower's."""
    return config_in_backbone(hydra_class_of(model), model.config)


def has_two_towers(model: PreTrainedModel) -> bool:
    """Whether a model has a tower for images and one for texts, for zero-shot classification."""
    return len(tower_configs(encoder_config(model))) > 1


def plain_config(cls: type, config: PreTrainedConfig, changes: Mapping[str, dict] | None = None) -> PreTrainedConfig:
    """The backbone's config for a Hydra's config.

    changes: by tower, fields that get other values
    """
    fields = config.to_dict()
    for tower in dict.fromkeys(("", *tower_configs(config))):
        part = fields[f"{tower}_config"] if tower else fields
        part.update((changes or {}).get(tower, {}))
        for name in HYDRA_FIELDS:
            part.pop(name, None)
    if cls.backbone_config_key is not None:
        classes = {name: fields[name] for name in CLASS_FIELDS if name in fields}
        fields = {cls.backbone_config_key: fields} | classes
    return cls.backbone_classes[0].config_class(**fields)


def hydra_config(
    config_class: type,
    config: PreTrainedConfig,
    towers: Mapping[str, dict] | None = None,
    shared: Sequence[str] = SHARED_PARTS,
    **others: Any,
) -> PreTrainedConfig:
    """A backbone's or a Hydra's config as a `config_class`.

    towers: by tower `kept_heads` and `trunk_layers`; by default one member that keeps all heads
    others: further fields
    """
    fields = config.to_dict() | others
    for tower in tower_configs(config):
        part = fields[f"{tower}_config"] if tower else fields
        part.update({"kept_heads": None, "trunk_layers": 0, "shared": list(shared)})
        part.update((towers or {}).get(tower, {}))
        for name in ("model_type", "pruned_heads"):
            part.pop(name, None)
    for name in ("model_type", "architectures", "auto_map", "decision"):
        fields.pop(name, None)
    result = config_class(**fields)
    result._attn_implementation = config._attn_implementation
    return result


def member_fields(config: PreTrainedConfig, index: int = 0) -> dict[str, dict]:
    """By tower, the `kept_heads` of one member. A tower that all members share has those of one."""
    return {
        tower: {"kept_heads": [[layer[min(index, len(layer) - 1)]] for layer in part.kept_heads]}
        for tower, part in tower_configs(config).items()
    }


# Modules and parameters


def isinstance_by_name(module: nn.Module, kind: type) -> bool:
    """Whether a module is of one of our classes; by name, as each repository loaded with `trust_remote_code` has its own."""
    return any(base.__name__ == kind.__name__ for base in type(module).__mro__)


def attention_names(model: nn.Module) -> dict[str, list[str]]:
    """Names of the fused attentions in the order of the layers, by tower."""
    names = {tower: [] for tower in tower_configs(model.config)}
    for name, module in model.named_modules():
        if isinstance_by_name(module, HydraAttention):
            tower = next(tower for tower, config in tower_configs(model.config).items() if config is module.config)
            names[tower].append(name)
    return names


@dataclass(frozen=True)
class Slot:
    """Where a parameter of a fused model belongs in its members.

    name: the parameter's name in a one-member Hydra
    member: the only member it belongs to, for a part that is not shared
    rows: how many rows each member owns, for a packed parameter
    A slot with neither belongs to all members: it is shared, or of the trunk.
    """

    name: str
    member: int | None = None
    rows: list[int] | None = None

    @property
    def is_shared(self) -> bool:
        return self.member is None and self.rows is None


def slots(model: nn.Module) -> Iterator[tuple[str, Slot]]:
    """(name, slot) of every parameter of a Hydra."""
    modules = dict(model.named_modules())
    split_parts = [name for name, module in modules.items() if isinstance_by_name(module, PerMember)]
    for name, _ in model.named_parameters():
        owner, _, parameter = name.rpartition(".")
        part = next((part for part in split_parts if name.startswith(f"{part}.")), None)
        if part is not None:
            index, _, rest = name.removeprefix(f"{part}.").partition(".")
            yield name, Slot(f"{part}.{rest}", member=int(index))
        elif isinstance_by_name(modules[owner], Grouped):
            is_row_per_member = isinstance_by_name(modules[owner], GroupedOutput) and parameter == "bias"
            rows = [1] * len(modules[owner].widths) if is_row_per_member else modules[owner].widths
            yield name, Slot(name, rows=rows if len(rows) == model.num_members else None)
        elif isinstance_by_name(modules[owner], LayerScale):
            rows = [1] * len(modules[owner].weight)
            yield name, Slot(name, rows=rows if len(rows) == model.num_members else None)
        elif name in model.per_member_parameters:
            yield name, Slot(name, rows=[1] * model.num_members)
        else:
            yield name, Slot(name)


def without_weights(model_class: type, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """A model on the meta device: it has names, shapes and counts, and no numbers."""
    with torch.device("meta"), no_init_weights():
        # In one dtype: towers are made in the dtype of their configs, what lies between them is not.
        return model_class(copy.deepcopy(config), **options).eval().float()


_outlines: dict[tuple, PreTrainedModel] = {}


def outline(model_class: type, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """`without_weights`, cached: read it, never change it."""
    key = model_class, config.to_json_string(use_diff=False), *options.items()
    model = _outlines.get(key)
    if model is None:
        if len(_outlines) >= MAX_CACHED_OUTLINES:
            _outlines.clear()
        model = _outlines[key] = without_weights(model_class, config, **options)
    return model


# Members


@dataclass(frozen=True)
class Member:
    """The config and the tensors of a one-member Hydra. The tensors are views of the model it was read from."""

    name: str
    config: PreTrainedConfig
    tensors: dict[str, torch.Tensor]


def have_equal_tensors(members: Sequence[Member], names: Iterable[str]) -> bool:
    """Whether the tensors of these names are bit for bit the same in all members."""
    first, *others = (member.tensors for member in members)
    return all(torch.equal(other[name].to(first[name].device), first[name]) for name in names for other in others)
