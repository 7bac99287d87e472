"""Heads turned off temporarily, in the model itself: what `head_mask` was in Transformers 4.

A head reaches the rest of the network through its slice of the output projection's input. With that slice zeroed, the model
computes what it would without the head, on every attention backend.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..fusion import attention_names, encoder_config, number_of_layers, projection_names, tower_configs
from ..fusion.building import remaining_heads
from ..fusion.structure import has_decoder
from ..models.auto import HYDRA_CLASSES


# Output projections inside a layer, in encoders that do not become Hydras.
OTHER_OUTPUTS = (
    "attention.out_proj",
    "attn.out_proj",
    "layer.0.SelfAttention.o",
    "self_attn.o_proj",
    "self_attn.out_proj",
)


class HeadOutput(NamedTuple):
    """An output projection, which reads (..., heads * head_dim), and the numbers of its heads in this order."""

    projection: nn.Module
    heads: list[int]
    head_dim: int


@contextmanager
def ablated(model: PreTrainedModel, heads_to_prune: dict) -> Iterator[PreTrainedModel]:
    """`with ablated(model, {0: [1, 3], 2: [0]}):` the model computes as if these heads were cut out.

    Forward and backward, in training or not, on every attention backend. Afterwards, also after an exception, the model is
    as before. In nested blocks, the heads of the outer ones stay off. The model itself is changed meanwhile, for other threads
    too: give each thread a copy if that must not be.

    Args:
        model: a model of Transformers or a one-member Hydra. Beyond the families that become Hydras, any encoder whose
            layers have an output projection with a known name and the shape that the config says; others are refused.
        heads_to_prune: `{layer: [heads]}`; for CLIP `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`
    """
    outputs = head_outputs(model)
    left = remaining_heads(
        {tower: [each.heads for each in layers] for tower, layers in outputs.items()}, heads_to_prune
    )
    with ExitStack() as hooks:
        for tower, layers in outputs.items():
            for output, heads in zip(layers, left[tower], strict=True):
                if heads != output.heads:
                    hooks.callback(_turn_off(output, set(output.heads) - set(heads)).remove)
        yield model


def _turn_off(output: HeadOutput, heads: set[int]) -> torch.utils.hooks.RemovableHandle:
    """Adds a hook that zeroes the projection's input from these heads."""
    is_off = torch.tensor([head in heads for head in output.heads], dtype=torch.bool, device="cpu")
    mask = is_off.repeat_interleave(output.head_dim)
    # masked_fill, because infinity times zero is NaN
    return output.projection.register_forward_pre_hook(
        lambda _, given: (given[0].masked_fill(mask.to(given[0].device), 0), *given[1:])
    )


def head_outputs(model: PreTrainedModel) -> dict[str, list[HeadOutput]]:
    """The output projections layer by layer, by tower ("" where there are none); refuses a model where they are unknown."""
    if not isinstance(model, PreTrainedModel):
        raise TypeError(
            f"model is a {type(model).__name__}: pass a model of Transformers, not compiled, wrapped or replicated"
        )
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError("model is compiled, and would not see that heads are turned off: pass it before compile()")
    if getattr(model, "num_members", 1) > 1:
        raise ValueError(f"model has {model.num_members} members, which keep different heads: pass model.member(i)")
    if hasattr(model, "num_members"):
        attentions = {tower: map(model.get_submodule, names) for tower, names in attention_names(model).items()}
        return {
            tower: [HeadOutput(each.o_proj, list(each.kept_heads[0]), each.head_dim) for each in layers]
            for tower, layers in attentions.items()
        }
    if has_decoder(model):
        raise ValueError(
            f"{type(model).__name__} is an encoder and a decoder, which number their layers alike: pass model.get_encoder()"
        )
    towers = tower_configs(encoder_config(model))
    return {
        tower: _of_layers(model, getattr(model, f"{tower}_model", None) if tower else model, config)
        for tower, config in towers.items()
    }


def _of_layers(model: PreTrainedModel, encoder: nn.Module | None, config: PreTrainedConfig) -> list[HeadOutput]:
    """The output projections of a plain encoder of `model`."""
    refusal = f"{type(model).__name__}: its heads cannot be told apart"
    counts = (getattr(config, name, None) for name in ("num_hidden_layers", "num_attention_heads"))
    if encoder is None or not all(isinstance(each, int) for each in counts):
        raise ValueError(f"{refusal}, the config does not say how many layers and heads there are")
    count, heads = number_of_layers(config), config.num_attention_heads
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
                f"{refusal}, the output projection of layer {layer} reads {width} numbers and the config names {heads} "
                f"heads of {head_dim}: pass the model as Transformers made it, or what prune_heads returned"
            )
    return [HeadOutput(projection, list(range(heads)), head_dim) for projection in stacks[0]]


def _outputs_in(layers: nn.ModuleList) -> list[nn.Module] | None:
    """The output projection of each layer; None where a layer has no known one, or more than one."""
    found = []
    for layer in layers:
        modules = dict(layer.named_modules())
        names = [name for name in known_outputs() if name in modules]
        if len(names) != 1:
            return None
        parents = [modules[names[0].rsplit(".", up)[0]] for up in range(1, names[0].count(".") + 1)]
        # Weights beside the projection (paired heads, windows, sinks) or a fused attention that never calls it
        if any(list(each.parameters(recurse=False)) or isinstance(each, nn.MultiheadAttention) for each in parents):
            return None
        found.append(modules[names[0]])
    return found


@cache
def known_outputs() -> tuple[str, ...]:
    """Names of output projections inside a layer: those of the families that become Hydras, and others."""
    of_families = {names[-1] for hydra in set(HYDRA_CLASSES.values()) for names in projection_names(hydra)}
    return tuple(sorted(of_families.union(OTHER_OUTPUTS)))
