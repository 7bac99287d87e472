"""Heads turned off for a while, in the model as it is: what `head_mask` was in Transformers 4.

What a head does reaches the rest of the network through its slice of what the output projection reads. With that slice
zeroed the model computes what it would with the head cut out, on every attention backend: the backends all end before it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..fusion import attention_names, encoder_config, projection_names, remaining_heads, tower_configs
from ..models.auto import HYDRA_CLASSES


# What encoders without a Hydra call the map behind their heads, inside a layer.
OTHER_OUTPUTS = (
    "attention.out_proj",
    "attn.out_proj",
    "layer.0.SelfAttention.o",
    "self_attn.o_proj",
    "self_attn.out_proj",
)


@dataclass(frozen=True)
class HeadOutput:
    """Where the heads of a layer meet.

    projection: the output projection, whose input is (..., heads * head_dim) with the heads one after the other
    heads: their numbers, in this order
    """

    projection: nn.Module
    heads: list[int]
    head_dim: int

    def mask_of(self, turned_off: list[int]) -> Tensor:
        """True where the input belongs to a head of `turned_off`: (heads * head_dim,)"""
        is_off = torch.tensor([head in turned_off for head in self.heads], dtype=torch.bool, device="cpu")
        return is_off.repeat_interleave(self.head_dim)


@contextmanager
def ablated(model: PreTrainedModel, heads_to_prune: dict) -> Iterator[PreTrainedModel]:
    """`with ablated(model, {0: [1, 3], 2: [0]}):` the model answers as if these heads were cut out.

    Forward and backward, in training or not, on every attention backend. Afterwards, also after an exception, the model is
    as it was. Blocks can be nested: heads of the outer ones stay off in the inner. The model itself is changed meanwhile, so
    other threads that use it see the same heads turned off; give each thread a copy if they must not.

    Args:
        model: a model of Transformers or a one-member Hydra. Beyond the families that become Hydras, any encoder whose
            layers have an output projection that is known by its name and has the shape that the config says; others are
            refused.
        heads_to_prune: `{layer: [heads]}`; for CLIP `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`
    """
    outputs = head_outputs(model)
    kept = {tower: [each.heads for each in layers] for tower, layers in outputs.items()}
    left = remaining_heads(kept, heads_to_prune)
    handles = []
    try:
        for tower, layers in outputs.items():
            for each, heads in zip(layers, left[tower], strict=True):
                if heads != each.heads:
                    turned_off = [head for head in each.heads if head not in heads]
                    handles.append(_zero_inputs(each.projection, each.mask_of(turned_off)))
        yield model
    finally:
        for handle in handles:
            handle.remove()


def _zero_inputs(projection: nn.Module, mask: Tensor):
    """A hook that zeroes what the projection reads where `mask` is True."""
    # Filled and not multiplied: what is turned off may be infinite.
    return projection.register_forward_pre_hook(
        lambda _, given: (given[0].masked_fill(mask.to(given[0].device), 0), *given[1:])
    )


def head_outputs(model: PreTrainedModel) -> dict[str, list[HeadOutput]]:
    """Where heads meet, layer by layer, by tower ("" where there are none); refuses a model where that is not known."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: pass a model of Transformers, not compiled, wrapped or replicated"
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError("model is compiled, and would not see that heads are turned off: pass it before compile()")
    if hasattr(model, "num_members"):
        return _of_hydra(model)
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{type(model).__name__} is an encoder and a decoder, which number their layers alike: pass model.get_encoder()"
        )
    towers = tower_configs(encoder_config(model))
    if list(towers) == [""]:
        return {"": _of_layers(model, model, towers[""])}
    return {
        tower: _of_layers(model, getattr(model, f"{tower}_model", None), config) for tower, config in towers.items()
    }


def _of_hydra(model: PreTrainedModel) -> dict[str, list[HeadOutput]]:
    if model.num_members > 1:
        raise ValueError(f"model has {model.num_members} members, which keep different heads: pass model.member(i)")
    return {
        tower: [
            HeadOutput(attention.o_proj, list(attention.kept_heads[0]), attention.head_dim)
            for attention in map(model.get_submodule, names)
        ]
        for tower, names in attention_names(model).items()
    }


def _of_layers(model: PreTrainedModel, encoder: nn.Module | None, config: PreTrainedConfig) -> list[HeadOutput]:
    """The same for a plain encoder of `model`."""
    refusal = f"{type(model).__name__}: its heads cannot be told apart"
    count, heads = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if encoder is None or not isinstance(count, int) or not isinstance(heads, int):
        raise ValueError(f"{refusal}, the config does not say how many layers and heads there are")
    stacks = [
        _outputs_in(each) for each in encoder.modules() if isinstance(each, nn.ModuleList) and len(each) == count
    ]
    stacks = [stack for stack in stacks if stack is not None]
    if len(stacks) != 1:
        why = "no list of layers with a known output projection" if not stacks else "several lists of layers"
        raise ValueError(f"{refusal}, it has {why}: pass an encoder that is made of {count} layers of one kind")
    head_dim = getattr(config, "head_dim", None) or getattr(config, "d_kv", None) or config.hidden_size // heads
    for layer, projection in enumerate(stacks[0]):
        width = getattr(projection, "in_features", None)
        if width != heads * head_dim:
            raise ValueError(
                f"{refusal}, the output projection of layer {layer} reads {width} numbers and the config speaks of {heads} "
                f"heads of {head_dim}: pass the model as Transformers made it, or what prune_heads or load_pruned returned"
            )
    return [HeadOutput(projection, list(range(heads)), head_dim) for projection in stacks[0]]


def _outputs_in(layers: nn.ModuleList) -> list[nn.Module] | None:
    """The output projection of each layer; None where one has none that is known, or more than one."""
    found = []
    for layer in layers:
        parts = dict(layer.named_modules())
        names = [name for name in known_outputs() if name in parts]
        if len(names) != 1 or not _leads_plainly_to(parts, names[0]):
            return None
        found.append(parts[names[0]])
    return found


def _leads_plainly_to(parts: dict[str, nn.Module], name: str) -> bool:
    """Whether nothing on the way to a projection has weights of its own (heads in pairs, windows, sinks) or computes
    without calling it."""
    ways = [parts[name.rsplit(".", up)[0]] for up in range(1, name.count(".") + 1)]
    return not any(list(way.parameters(recurse=False)) or isinstance(way, nn.MultiheadAttention) for way in ways)


@cache
def known_outputs() -> tuple[str, ...]:
    """Names of output projections inside a layer: those of the families that become Hydras, and others."""
    of_families = {names[-1] for hydra in set(HYDRA_CLASSES.values()) for names in projection_names(hydra)}
    return tuple(sorted(of_families.union(OTHER_OUTPUTS)))
