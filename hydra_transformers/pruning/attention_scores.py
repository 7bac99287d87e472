"""Scores of how sharply heads attend: the entropy of their attention weights, and their confidence (Voita et al., 2019)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import batches, split_labels
from ..data.prediction import accepted_inputs, check_class_prompts
from .heads import Head, Prompts, Towers, chosen_towers, has_two_towers, head_at, heads_of
from .units import by_unit, scored_towers, working_copy


def minus_entropy(weights: Tensor) -> Tensor:
    """In nats: a head that attends everywhere has the lowest score."""
    return -torch.special.entr(weights).sum(dim=-1)


def largest_weight(weights: Tensor) -> Tensor:
    """The confidence. Voita et al. also leave out the end-of-sentence token, which not every model has."""
    return weights.amax(dim=-1)


@torch.no_grad()
def attention_scores(
    measure: Callable[[Tensor], Tensor],
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Prompts | None = None,
    towers: Towers | None = None,
) -> dict[Head, float]:
    """The mean of `measure` over all queries but padding. Needs no labels.

    measure: attention weights (rows, heads, queries, keys) -> (rows, heads, queries)
    """
    hydra = working_copy(model)
    hydra.set_attn_implementation("eager")  # the backend that returns attention weights
    towers = chosen_towers(hydra, scored_towers(hydra, towers))
    means: dict[tuple, Tensor] = {}
    for tower in towers:
        encoder = hydra.base_model if tower == "" else getattr(hydra, f"{tower}_model")
        order = [number for number, _ in encoder.layers_in_order()]
        sums, queries = dict.fromkeys(order, 0), 0
        for inputs in _inputs_of(tower, encoder, hydra, data, class_prompts):
            attentions = encoder(**inputs, output_attentions=True).attentions
            rows, _, tokens, _ = attentions[0].shape
            is_real = inputs.get("attention_mask", torch.ones(rows, tokens, device=hydra.device)).bool()
            queries += int(is_real.sum())
            for layer, weights in zip(order, attentions, strict=True):
                sums[layer] += (measure(weights.double()) * is_real.unsqueeze(1)).sum(dim=(0, 2))
        for layer, total in sums.items():
            means[head_at(tower, layer, 0)[:-1]] = total / (queries * order.count(layer))
    return by_unit(heads_of(hydra, None if towers == [""] else towers), means)


def _inputs_of(
    tower: str, encoder: PreTrainedModel, hydra: PreTrainedModel, data: Any, class_prompts: Prompts | None
) -> Iterator[dict[str, Tensor]]:
    """The inputs of an encoder, batch by batch; CLIP's text tower reads the prompts."""
    if class_prompts is not None and not has_two_towers(hydra):
        raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(hydra).__name__}: leave it out")
    if tower == "text":
        check_class_prompts(class_prompts, hydra)
        yield accepted_inputs(encoder, {name: value.to(hydra.device) for name, value in class_prompts.items()})
        return
    is_empty = True
    for batch in batches(data, device=hydra.device):
        is_empty = False
        inputs = accepted_inputs(encoder, split_labels(batch)[0])
        yield {name: value.to(hydra.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
    if is_empty:
        raise ValueError("data has no samples: pass at least one batch")
