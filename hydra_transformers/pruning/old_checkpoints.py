"""Models that Transformers 4 pruned and saved: `config.pruned_heads` names the heads, and the weights have lost them.

Transformers 5 ignores the field, builds the whole model, and stops at weights of other shapes. Here the model is built with the
smaller shapes, then Transformers itself loads the weights, because it knows their old names.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import transformers
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..fusion import (
    attention_names,
    backbone_names,
    config_in_backbone,
    dense_outline,
    hydra_class_of,
    hydra_config,
    number_of_layers,
    projection_names,
    remaining_heads,
    tower_configs,
)
from ..models.auto import HEADS, HYDRA_CLASSES, AutoHydra, config_of


if TYPE_CHECKING:
    from ..models.auto import HydraModel


def load_pruned(name: str | os.PathLike) -> "HydraModel":
    """A one-member Hydra of a model that `prune_heads` of Transformers 4 made, equal to what was saved.

    name: a folder or Hub name whose config.json has `pruned_heads`, with weights in safetensors
    """
    config = config_of(name)
    if hasattr(config, "kept_heads"):
        raise ValueError(f"{name} is a Hydra, which from_pretrained loads: pass a model that Transformers 4 pruned")
    plain_class = _class_of(config, name)
    kept = _heads_left(config_in_backbone(HYDRA_CLASSES[plain_class], config), name)
    if Path(name).is_dir() and not list(Path(name).glob("*.safetensors")):
        raise ValueError(
            f"{name} has no weights in safetensors, and pickled ones are not read here: convert them, "
            "safetensors.torch.save_file(torch.load('pytorch_model.bin', weights_only=True), 'model.safetensors', "
            "{'format': 'pt'})"
        )
    why = None
    if any(query == key for query, key, *_ in projection_names(HYDRA_CLASSES[plain_class])):
        why = "whose queries, keys and values are one map"
    elif hasattr(config, "num_key_value_heads"):
        why = "whose config counts heads of keys"
    elif _has_positions_per_head(HYDRA_CLASSES[plain_class], config):
        why = "whose heads weigh the positions of tokens"
    if why is not None:
        raise ValueError(
            f"{name} is a {plain_class.__name__}, {why}, which Transformers 4 pruned no heads of: load it with its own class, "
            "and prune it with prune_heads"
        )
    try:
        model, found = sliced_class(plain_class, kept).from_pretrained(
            name, config=config, use_safetensors=True, output_loading_info=True
        )
    except RuntimeError as error:
        if "size mismatch" not in str(error) and "ignore_mismatched_sizes" not in str(error):
            raise
        raise ValueError(
            f"{name}: the shapes of the weights are not those that config.pruned_heads asks for: check that config.json was "
            "saved with them"
        ) from error
    missing = sorted(found["missing_keys"])
    if missing:
        raise ValueError(f"{name} has no {missing[0]}: pass a model that was saved whole")
    attention = model.config._attn_implementation
    if not all(heads for layers in kept.values() for heads in layers):
        model.set_attn_implementation(
            "eager"
        )  # to be compared by: without a head, sdpa of torch 2.11 ends the process
    hydra = AutoHydra.from_backbone(model)
    hydra.set_attn_implementation(attention)
    return hydra


def _has_positions_per_head(hydra_class: type[PreTrainedModel], config: PreTrainedConfig) -> bool:
    """Whether heads own more than rows of q, k, v and o."""
    towers = tower_configs(hydra_config(hydra_class.config_class, config_in_backbone(hydra_class, config)))
    return any(each.layer_spec.position_terms or each.layer_spec.bias_distances for each in towers.values())


def _heads_left(config: PreTrainedConfig, name: str | os.PathLike) -> dict[str, list[list[int]]]:
    """The heads that are left by tower and layer; refuses a config without pruned heads."""
    towers = tower_configs(config)
    whole = {
        tower: [list(range(each.num_attention_heads)) for _ in range(number_of_layers(each))]
        for tower, each in towers.items()
    }
    pruned = {tower: getattr(each, "pruned_heads", None) or {} for tower, each in towers.items()}
    if not any(pruned.values()):
        raise ValueError(
            f"{name} names no pruned heads (pruned_heads in config.json): load it with its own class of Transformers"
        )
    try:
        return remaining_heads(whole, pruned.get("", pruned))
    except (TypeError, ValueError) as error:
        raise ValueError(f"pruned_heads in the config.json of {name} is broken ({error})") from error


def _class_of(config: PreTrainedConfig, name: str | os.PathLike) -> type[PreTrainedModel]:
    """The class that was saved; where the config does not say, the one for the family's task."""
    saved = (config.architectures or [None])[0]
    found = HEADS.get(config.model_type) if saved is None else getattr(transformers, saved, None)
    if found not in HYDRA_CLASSES:
        raise ValueError(
            f"{name} is a {saved or config.model_type}: pass one of {', '.join(AutoHydra.supported())}, or save the model's "
            "encoder as one of them first"
        )
    return found


def sliced_class(model_class: type[PreTrainedModel], kept: dict[str, list[list[int]]]) -> type[PreTrainedModel]:
    """A class whose models have only the heads in `kept`."""

    def make(self: PreTrainedModel, config: PreTrainedConfig, *given: Any, **options: Any) -> None:
        model_class.__init__(self, config, *given, **options)
        _slice_projections(self, kept)

    # Transformers finds the conversions of old weights by the name and module of the class.
    members = {"__init__": make, "__module__": model_class.__module__, "__qualname__": model_class.__qualname__}
    return type(model_class.__name__, (model_class,), members)


def _slice_projections(model: PreTrainedModel, kept: dict[str, list[list[int]]]) -> None:
    """Gives a plain model's q, k, v and output projections empty weights of the sizes for the heads in `kept`."""
    hydra = hydra_class_of(model)
    theirs, dense = backbone_names(hydra, model), dense_outline(hydra, model)
    for tower, names in attention_names(dense).items():
        for attention, heads in zip(names, kept[tower], strict=True):
            width = len(heads) * dense.get_submodule(attention).head_dim
            for name in theirs[f"{attention}.qkv_proj.weight"]:
                _resize(model.get_submodule(name.removesuffix(".weight")), rows=width)
            output, *_ = theirs[f"{attention}.o_proj.weight"]
            _resize(model.get_submodule(output.removesuffix(".weight")), columns=width)


def _resize(linear: nn.Linear, rows: int | None = None, columns: int | None = None) -> None:
    linear.out_features = linear.out_features if rows is None else rows
    linear.in_features = linear.in_features if columns is None else columns
    linear.weight = nn.Parameter(linear.weight.new_empty(linear.out_features, linear.in_features))
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_empty(linear.out_features))
