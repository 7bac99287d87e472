"""The weights of a one-member Hydra's heads, layer by layer, from which heads are scored."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..fusion.packed_heads import qkv_by_head
from ..fusion.structure import has_two_towers
from .heads import Head, Towers, attention_of, heads_of, prune_heads, tower_and_place


Layer = tuple  # (layer,), or (tower, layer)


def working_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a one-member Hydra to score on, at least in float32.

    Sums of gradients need the digits.
    """
    hydra = prune_heads(model)
    if hydra.dtype == torch.float64:
        return hydra
    return hydra.float()


def scored_towers(hydra: PreTrainedModel, towers: Towers | None) -> Towers | None:
    """Return `towers`, by default the vision tower alone: scores of two are not on one scale."""
    if towers is None and has_two_towers(hydra):
        return ["vision"]
    return towers


def heads_to_score(
    model: PreTrainedModel, towers: Towers | None
) -> tuple[PreTrainedModel, list[Head], dict[Layer, nn.Module]]:
    """Return a copy of the model to score on, its heads, and the attentions of their layers."""
    hydra = working_copy(model)
    heads = heads_of(hydra, scored_towers(hydra, towers))
    return hydra, heads, attentions_of(hydra, heads)


def attentions_of(hydra: PreTrainedModel, heads: Iterable[Head]) -> dict[Layer, nn.Module]:
    """Return the attention of each layer that has some of `heads`."""
    attentions = {}
    for layer in by_layer(heads):
        tower, number, _ = tower_and_place((*layer, 0))
        attentions[layer] = attention_of(hydra, tower, number)
    return attentions


def rows_by_head(tensor: Tensor, attention: nn.Module) -> Tensor:
    """Reshape a tensor like `qkv_proj.weight`, or its bias, to (q k v, heads, numbers).

    A key and value that several heads read counts for each of them.
    """
    return qkv_by_head(tensor, attention).flatten(2)


def columns_by_head(tensor: Tensor, attention: nn.Module) -> Tensor:
    """Reshape a tensor like `o_proj.weight` to (1, heads, numbers)."""
    return tensor.unflatten(0, (1, -1, attention.head_dim)).flatten(2)


def by_layer(heads: Iterable[Head]) -> dict[Layer, list[Head]]:
    """Group heads by layer, in their order."""
    layers: dict[Layer, list[Head]] = {}
    for head in heads:
        layer = head[:-1]
        layers.setdefault(layer, []).append(head)
    return layers


def by_head(heads: Sequence[Head], scores_of_layers: Mapping[Layer, Tensor]) -> dict[Head, float]:
    """Return {head: score} from one tensor (heads,) per layer."""
    remaining = {layer: iter(values.tolist()) for layer, values in scores_of_layers.items()}
    scores = {}
    for head in heads:
        layer = head[:-1]
        scores[head] = next(remaining[layer])
    check_finite(scores)
    return scores


def check_finite(scores: Mapping[Head, float]) -> None:
    """Raise if a score is not a finite number."""
    for head, score in scores.items():
        if not math.isfinite(score):
            raise ValueError(f"the score of {head} is {score}: check the model's weights and the data")
