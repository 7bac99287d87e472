"""The parts of a Hydra: its towers, their attentions, and which rows of its parameters belong to which member."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from ..models.auto import HYDRA_CLASSES, head_of
from ..models.configuration_hydra import KeptNeurons
from ..models.modeling_hydra import Grouped, HydraAttention, PerMember


def tower_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """The configs that carry `kept_heads`, by tower: {"": config}, or {"vision": ..., "text": ...} for two towers."""
    if hasattr(config, "vision_config"):
        return {"vision": config.vision_config, "text": config.text_config}
    return {"": config}


# What a classifier's config says of its classes.
OF_CLASSES = ("id2label", "label2id", "problem_type")


def config_in_backbone(cls: type | None, config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a backbone's config that a `cls` is made from: all of it, or one tower's with the classes of the whole."""
    key = getattr(cls, "backbone_config_key", None)  # which the code of a repository may not have yet
    if key is None:
        return config
    part = copy.deepcopy(getattr(config, key))
    of_classes = {name: copy.deepcopy(getattr(config, name)) for name in OF_CLASSES}
    for name, value in (of_classes | cls.own_fields).items():
        setattr(part, name, value)
    return part


def encoder_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The config, with layers and heads, of what Hydras are made from in a plain model or a Hydra: not always all of it."""
    cls = next((HYDRA_CLASSES[each] for each in HYDRA_CLASSES if isinstance(model, each)), None)
    return config_in_backbone(cls, model.config)


def saved_tower_configs(config: PreTrainedConfig) -> dict[str, PreTrainedConfig]:
    """`tower_configs` of the model with a head that a config was saved with: a classifier of one of two towers has one."""
    return tower_configs(config_in_backbone(HYDRA_CLASSES.get(head_of(config)), config))


def fields_of_backbone(cls: type, fields: dict) -> dict:
    """The way back: the fields of a backbone's config, for those of the part that a `cls` is made from."""
    key = getattr(cls, "backbone_config_key", None)
    if key is None:
        return fields
    return {key: fields} | {name: fields[name] for name in OF_CLASSES if name in fields}


def neurons_of_member(config: PreTrainedConfig, index: int) -> dict[str, KeptNeurons | None]:
    """`kept_neurons` of one member of a Hydra alone, by tower; None where it keeps all."""
    kept = {tower: getattr(each, "kept_neurons", None) for tower, each in tower_configs(config).items()}
    return {
        tower: None if layers is None else [[masks[min(index, len(masks) - 1)]] for masks in layers]
        for tower, layers in kept.items()
    }


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
            rows = modules[owner].member_rows(parameter)
            yield name, Slot(name, rows=rows if len(rows) == model.num_members else None)
        elif name in model.per_member_parameters:
            yield name, Slot(name, rows=[1] * model.num_members)
        else:
            yield name, Slot(name)


def hydra_config(
    config_class: type,
    config: PreTrainedConfig,
    kept: dict | None,
    shared: Sequence[str],
    trunks: dict[str, int] | None = None,
    neurons: dict[str, KeptNeurons | None] | None = None,
    **others,
) -> PreTrainedConfig:
    """A backbone's or a Hydra's config as a `config_class` with these kept heads by tower (None: all of them), and by tower
    this many leading layers that are one for all members (None: not any) and these kept neurons (None: all)."""
    fields = config.to_dict() | others
    for tower in tower_configs(config):
        part = fields[f"{tower}_config"] if tower else fields
        part.pop("model_type", None)
        part.pop("pruned_heads", None)
        part["kept_heads"] = None if kept is None else kept[tower]
        part.pop("kept_neurons", None)
        if neurons is not None and neurons[tower] is not None:
            part["kept_neurons"] = neurons[tower]
        part["shared"] = list(shared)
        part["trunk_layers"] = 0 if trunks is None else trunks[tower]
    for name in ("model_type", "architectures", "auto_map", "decision"):
        fields.pop(name, None)
    result = config_class(**fields)
    result._attn_implementation = config._attn_implementation
    return result


def without_weights(model_class: type, config: PreTrainedConfig, **options) -> PreTrainedModel:
    """A model on the meta device, to ask for names, shapes and counts and not to compute with."""
    with torch.device("meta"), no_init_weights():
        # Towers are made in the dtype that their configs name, what lies between them is not: products know one alone.
        return model_class(copy.deepcopy(config), **options).eval().float()


MOST_OUTLINES = 16
_outlines: dict[tuple, PreTrainedModel] = {}


def outline(model_class: type, config: PreTrainedConfig, **options) -> PreTrainedModel:
    """`without_weights`, made once for equal configs: to be read, never changed."""
    key = model_class, config.to_json_string(use_diff=False), *options.items()
    found = _outlines.get(key)
    if found is None:
        found = without_weights(model_class, config, **options)
        for oldest in list(_outlines)[: max(0, len(_outlines) + 1 - MOST_OUTLINES)]:
            _outlines.pop(oldest, None)
        _outlines[key] = found
    return found
