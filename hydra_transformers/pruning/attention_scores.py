"""Heads by how sharply they look: the entropy of their attention weights, and their confidence (Voita et al., 2019)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..data.batches import batches, split_labels
from ..data.prediction import accepted_inputs, check_class_prompts
from .heads import Head, chosen_towers, has_two_towers, head_at
from .units import scored_towers, working_copy


def entropy_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
) -> dict[Head, float]:
    """Minus the mean entropy (in nats) of the attention weights of a query over the keys: a head that looks everywhere has
    the lowest score. The mean is over all queries of all samples but padding. Labels are not needed."""
    return _mean_over_queries(model, data, class_prompts, towers, lambda weights: -_entropy(weights))


def confidence_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
) -> dict[Head, float]:
    """The mean of the largest attention weight of a query, over all queries of all samples but padding; labels are not
    needed. Voita et al. also leave out the end-of-sentence token, which not every model has."""
    return _mean_over_queries(model, data, class_prompts, towers, lambda weights: weights.amax(dim=-1))


def _entropy(weights: Tensor) -> Tensor:
    return torch.special.entr(weights).sum(dim=-1)


@torch.no_grad()
def _mean_over_queries(
    model: PreTrainedModel,
    data: Any,
    class_prompts: Mapping[str, Tensor] | None,
    towers: Sequence[str] | None,
    of_query: Callable[[Tensor], Tensor],
) -> dict[Head, float]:
    """of_query: from attention weights (rows, heads, queries, keys) to a number for each query, (rows, heads, queries)"""
    hydra = working_copy(model)  # a copy of its own, so that the model keeps its backend
    hydra.set_attn_implementation("eager")
    chosen = chosen_towers(hydra, scored_towers(hydra, towers))
    sums: dict[tuple[str, int], Tensor] = {}
    queries = dict.fromkeys(chosen, 0)
    for tower in chosen:
        encoder = hydra.base_model if tower == "" else getattr(hydra, f"{tower}_model")
        for inputs in _inputs_of(tower, encoder, hydra, data, class_prompts):
            attentions = encoder(**inputs, output_attentions=True).attentions
            is_real = _real_queries(inputs, attentions[0])
            queries[tower] += int(is_real.sum())
            for layer, weights in enumerate(attentions):
                total = (of_query(weights.double()) * is_real.unsqueeze(1)).sum(dim=(0, 2))
                sums[tower, layer] = sums.get((tower, layer), 0) + total
    kept = hydra.config.kept_heads if chosen != [""] else {"": hydra.config.kept_heads}
    return {
        head_at(tower, layer, head): value / queries[tower]
        for (tower, layer), total in sums.items()
        for head, value in zip(kept[tower][layer][0], total.tolist(), strict=True)
    }


def _inputs_of(
    tower: str,
    encoder: PreTrainedModel,
    hydra: PreTrainedModel,
    data: Any,
    class_prompts: Mapping[str, Tensor] | None,
) -> Iterator[dict[str, Tensor]]:
    """What an encoder reads, batch by batch; the text tower of CLIP reads the prompts."""
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


def _real_queries(inputs: Mapping[str, Tensor], weights: Tensor) -> Tensor:
    """(rows, queries), True for all but padding."""
    rows, _, queries, _ = weights.shape
    mask = inputs.get("attention_mask")
    if mask is None:
        return torch.ones(rows, queries, dtype=torch.bool, device=weights.device)
    return mask.bool()
