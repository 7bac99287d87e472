"""The weights of a one-member Hydra's heads, layer by layer: what scores of heads are computed from."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fusion.packed_heads import qkv_by_head
from .heads import Head, Towers, attention_of, has_two_towers, heads_of, prune_heads, tower_and_place


Layer = tuple  # (layer,), or (tower, layer)


def working_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A one-member Hydra to score on, at least in float32: sums of gradients need the digits."""
    hydra = prune_heads(model)
    return hydra if hydra.dtype == torch.float64 else hydra.float()


def scored_towers(hydra: PreTrainedModel, towers: Towers | None) -> Towers | None:
    """By default the vision tower alone: scores of two towers are not on one scale."""
    return ["vision"] if towers is None and has_two_towers(hydra) else towers


def heads_to_score(
    model: PreTrainedModel, towers: Towers | None
) -> tuple[PreTrainedModel, list[Head], dict[Layer, nn.Module]]:
    """A copy of the model to score on, its heads, and the attention of each of their layers."""
    hydra = working_copy(model)
    heads = heads_of(hydra, scored_towers(hydra, towers))
    return hydra, heads, attentions_of(hydra, heads)


def attentions_of(hydra: PreTrainedModel, heads: Iterable[Head]) -> dict[Layer, nn.Module]:
    """The attention of each layer that has some of `heads`."""
    return {layer: attention_of(hydra, *tower_and_place((*layer, 0))[:2]) for layer in by_layer(heads)}


def rows_by_head(tensor: Tensor, attention: nn.Module) -> Tensor:
    """A tensor like `qkv_proj.weight` or its bias -> (q k v, heads, numbers); a key and value that several heads read counts
    for each of them."""
    return qkv_by_head(tensor, attention).flatten(2)


def columns_by_head(tensor: Tensor, attention: nn.Module) -> Tensor:
    """A tensor like `o_proj.weight` -> (1, heads, numbers)"""
    return tensor.unflatten(0, (1, -1, attention.head_dim)).flatten(2)


def by_layer(heads: Iterable[Head]) -> dict[Layer, list[Head]]:
    layers: dict[Layer, list[Head]] = {}
    for head in heads:
        layers.setdefault(head[:-1], []).append(head)
    return layers


def by_head(heads: Sequence[Head], of_layers: Mapping[Layer, Tensor]) -> dict[Head, float]:
    """{head: score} from one tensor (heads,) per layer."""
    iterators = {layer: iter(values.tolist()) for layer, values in of_layers.items()}
    scores = {head: next(iterators[head[:-1]]) for head in heads}
    check_finite(scores)
    return scores


def check_finite(scores: Mapping[Head, float]) -> None:
    for head, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"the score of {head} is {score}: check the model's weights and the data")
