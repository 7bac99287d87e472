"""The parts of a Hydra: its towers, their attentions, and which rows of its parameters belong to
which member."""

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
    """Return the configs that carry `kept_heads` by tower: {"": config}, or {"vision": ..., "text":
    ...} for two towers."""
    if hasattr(config, "vision_config"):
        return {"vision": config.vision_config, "text": config.text_config}
    return {"": config}


def config_in_backbone(cls: type | None, config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the part of a backbone's config that a `cls` is built from: all of it, or one tower's
    with the classes of the whole."""
    key = getattr(cls, "backbone_config_key", None)
    if key is None:
        return config
    part = copy.deepcopy(getattr(config, key))
    for name in CLASS_FIELDS:
        setattr(part, name, copy.deepcopy(getattr(config, name)))
    for name, value in cls.own_fields.items():
        setattr(part, name, value)
    return part


def number_of_layers(config: PreTrainedConfig) -> int:
    """Return how many layers of a backbone or a Hydra have weights of their own. Where groups of
    layers share them, that is one for each group, which runs again and again."""
    return getattr(config, "num_hidden_groups", config.num_hidden_layers)


def hydra_class_of(model: nn.Module) -> type | None:
    """Return the Hydra class that is built from a plain model; None for other models, Hydras among
    them."""
    for backbone, hydra in hydra_classes().items():
        if isinstance(model, backbone):
            return hydra
    return None


def without_head(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of a model that a `cls` is built from: its encoder, or all of it."""
    # The base model of an encoder can be a part of it, as for DINOv3.
    if not cls.is_base_model or isinstance(model, cls.backbone_classes):
        return model
    # The base model of a Whisper with a decoder is not its encoder, nor does Whisper's prefix name
    # it.
    for module in model.modules():
        if isinstance(module, cls.backbone_classes):
            return module
    return model.base_model


def encoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the config with the layers and heads of a plain model or a Hydra; of a classifier on
    one of two towers, that tower's."""
    return config_in_backbone(hydra_class_of(model), model.config)


def has_two_towers(model: PreTrainedModel) -> bool:
    """Whether a model has a tower for images and one for texts, for zero-shot classification."""
    return len(tower_configs(encoder_config(model))) > 1


def plain_config(cls: type, config: PreTrainedConfig, changes: Mapping[str, dict] | None = None) -> PreTrainedConfig:
    """Return the backbone's config for a Hydra's config.

    changes: by tower, fields that get other values
    """
    changes = changes or {}
    fields = config.to_dict()
    for tower in dict.fromkeys(("", *tower_configs(config))):
        part = fields[f"{tower}_config"] if tower else fields
        part.update(changes.get(tower, {}))
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
    """Return a backbone's or a Hydra's config as a `config_class`.

    towers: by tower `kept_heads` and `trunk_layers`; by default one member that keeps all heads
    others: further fields
    """
    towers = towers or {}
    fields = config.to_dict() | others
    for tower in tower_configs(config):
        part = fields[f"{tower}_config"] if tower else fields
        part.update({"kept_heads": None, "trunk_layers": 0, "shared": list(shared)})
        part.update(towers.get(tower, {}))
        for name in ("model_type", "pruned_heads"):
            part.pop(name, None)
    for name in ("model_type", "architectures", "auto_map", "decision"):
        fields.pop(name, None)
    result = config_class(**fields)
    result._attn_implementation = config._attn_implementation
    return result


def member_fields(config: PreTrainedConfig, index: int = 0) -> dict[str, dict]:
    """Return the `kept_heads` of one member by tower. A tower that all members share has those of
    one."""
    fields = {}
    for tower, part in tower_configs(config).items():
        kept_heads = []
        for layer in part.kept_heads:
            member = min(index, len(layer) - 1)
            kept_heads.append([layer[member]])
        fields[tower] = {"kept_heads": kept_heads}
    return fields


# Modules and parameters


def isinstance_by_name(module: nn.Module, kind: type) -> bool:
    """Whether a module is of one of our classes; by name, as each repository that is loaded with
    `trust_remote_code` has its own."""
    return any(base.__name__ == kind.__name__ for base in type(module).__mro__)


def attention_names(model: nn.Module) -> dict[str, list[str]]:
    """Return the names of the fused attentions in the order of the layers, by tower."""
    configs = tower_configs(model.config)
    names = {tower: [] for tower in configs}
    for name, module in model.named_modules():
        if not isinstance_by_name(module, HydraAttention):
            continue
        for tower, config in configs.items():
            if config is module.config:
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
    """Yield (name, slot) of every parameter of a Hydra."""
    modules = dict(model.named_modules())
    split_parts = [name for name, module in modules.items() if isinstance_by_name(module, PerMember)]
    for name, _ in model.named_parameters():
        # A part with a module for each member: "mlp.1.fc1.weight" is "mlp.fc1.weight" of member 1.
        parts = [part for part in split_parts if name.startswith(f"{part}.")]
        if parts:
            index, _, rest = name.removeprefix(f"{parts[0]}.").partition(".")
            yield name, Slot(f"{parts[0]}.{rest}", member=int(index))
            continue

        # Rows for each member; in the trunk those of one, which all share.
        rows = _rows_of_members(model, modules, name)
        if rows is not None and len(rows) != model.num_members:
            rows = None
        yield name, Slot(name, rows=rows)


def _rows_of_members(model: nn.Module, modules: Mapping[str, nn.Module], name: str) -> list[int] | None:
    """Return how many rows each member owns in a parameter; None where it is not packed."""
    owner_name, _, parameter = name.rpartition(".")
    owner = modules[owner_name]
    if isinstance_by_name(owner, Grouped):
        has_row_per_member = isinstance_by_name(owner, GroupedOutput) and parameter == "bias"
        return [1] * len(owner.widths) if has_row_per_member else owner.widths
    if isinstance_by_name(owner, LayerScale):
        return [1] * len(owner.weight)
    if name in model.per_member_parameters:
        return [1] * model.num_members
    return None


def without_weights(model_class: type, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a model on the meta device: it has names, shapes and counts, and no numbers."""
    with torch.device("meta"), no_init_weights():
        # In one dtype: towers are made in the dtype of their configs, what lies between them is
        # not.
        return model_class(copy.deepcopy(config), **options).eval().float()


_outlines: dict[tuple, PreTrainedModel] = {}


def outline(model_class: type, config: PreTrainedConfig, **options: Any) -> PreTrainedModel:
    """Return a model `without_weights`, cached: read it, never change it."""
    key = model_class, config.to_json_string(use_diff=False), *options.items()
    model = _outlines.get(key)
    if model is None:
        if len(_outlines) >= MAX_CACHED_OUTLINES:
            _outlines.clear()
        model = without_weights(model_class, config, **options)
        _outlines[key] = model
    return model


# Members


@dataclass(frozen=True)
class Member:
    """The config and the tensors of a one-member Hydra. The tensors are views of the model it was
    read from."""

    name: str
    config: PreTrainedConfig
    tensors: dict[str, torch.Tensor]


def have_equal_tensors(members: Sequence[Member], names: Iterable[str]) -> bool:
    """Whether the tensors of these names are bit for bit the same in all members."""
    first, *others = [member.tensors for member in members]
    for name in names:
        expected = first[name]
        for other in others:
            if not torch.equal(other[name].to(expected.device), expected):
                return False
    return True
