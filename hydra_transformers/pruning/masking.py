"""Heads turned off temporarily, in the model itself: what `head_mask` was in Transformers 4.

A head reaches the rest of the network through its slice of the output projection's input. With that
slice zeroed, the model computes what it would without the head, on every attention backend.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from ..fusion.building import remaining_heads
from ..fusion.reading import backbone_names, dense_outline
from ..fusion.structure import attention_names
from ..models.auto import hydra_class


class HeadOutput(NamedTuple):
    """An output projection, which reads (..., heads * head_dim), and the numbers of its heads in
    this order.
    """

    projection: nn.Module
    heads: list[int]
    head_dim: int


@contextmanager
def ablated(model: PreTrainedModel, heads_to_prune: dict) -> Iterator[PreTrainedModel]:
    """Turn heads off for a while: the model computes as if they were cut out.

    `with ablated(model, {0: [1, 3], 2: [0]}):` holds forward and backward, in training or not, on
    every attention backend. Afterwards, also after an exception, the model is as before. In nested
    blocks, the heads of the outer ones stay off. The model itself is changed meanwhile, for other
    threads too: give each thread a copy if that must not be.

    Args:
        model (`PreTrainedModel`): a model of Transformers of a family that becomes a Hydra, or a
            one-member Hydra.
        heads_to_prune (`dict`): `{layer: [heads]}`; for CLIP
            `{"vision": {layer: [heads]}, "text": {layer: [heads]}}`.
    """
    outputs = head_outputs(model)
    heads_before = {tower: [output.heads for output in layers] for tower, layers in outputs.items()}
    heads_after = remaining_heads(heads_before, heads_to_prune)
    with ExitStack() as hooks:
        for tower, layers in outputs.items():
            for output, heads in zip(layers, heads_after[tower], strict=True):
                if heads == output.heads:
                    continue
                turned_off = set(output.heads) - set(heads)
                handle = _turn_off(output, turned_off)
                hooks.callback(handle.remove)
        yield model


def _turn_off(output: HeadOutput, heads: set[int]) -> torch.utils.hooks.RemovableHandle:
    """Add a hook that zeroes the projection's input from these heads."""
    is_off = torch.tensor([head in heads for head in output.heads], dtype=torch.bool, device="cpu")
    mask = is_off.repeat_interleave(output.head_dim)

    def zero(_: nn.Module, args: tuple) -> tuple:
        states, *others = args
        # masked_fill, because infinity times zero is NaN
        return (states.masked_fill(mask.to(states.device), 0), *others)

    return output.projection.register_forward_pre_hook(zero)


def head_outputs(model: PreTrainedModel) -> dict[str, list[HeadOutput]]:
    """Return the output projections layer by layer, by tower ("" where there are none).

    Raises where hooks would have no effect.
    """
    cls = hydra_class(model)  # raises for other families
    if any(module._compiled_call_impl is not None for module in model.modules()):
        raise ValueError("model is compiled, and would not see that heads are turned off: pass it before compile()")
    if getattr(model, "num_members", 1) > 1:
        raise ValueError(f"model has {model.num_members} members, which keep different heads: pass model.member(i)")
    is_hydra = cls is type(model)
    if not cls.supports_lora_on_qkvo and not is_hydra:
        raise ValueError(f"{type(model).__name__} reads its projections without calling them: pass prune_heads(model)")

    # A model of Transformers calls its projections otherwise than the Hydra of its family.
    outline = model
    names_in_backbone = {}
    if not is_hydra:
        outline = dense_outline(cls, model)
        names_in_backbone = backbone_names(cls, model)

    outputs = {}
    for tower, names in attention_names(outline).items():
        outputs[tower] = []
        for name in names:
            attention = outline.get_submodule(name)
            output = f"{name}.o_proj"
            if not is_hydra:
                weight_name = names_in_backbone[f"{output}.weight"][0]
                output = weight_name.removesuffix(".weight")
            projection = model.get_submodule(output)
            heads = list(attention.kept_heads[0])

            # Heads that Transformers' own pruning cut out would shift the others.
            expected_width = len(heads) * attention.head_dim
            width = getattr(projection, "in_features", expected_width)
            if width != expected_width:
                raise ValueError(
                    f"{output} reads {width} numbers, not {len(heads)} heads of {attention.head_dim}: pass the model "
                    "as "
                    "Transformers made it, or what prune_heads returned"
                )
            outputs[tower].append(HeadOutput(projection, heads, attention.head_dim))
    return outputs
