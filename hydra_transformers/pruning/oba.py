"""OBA (Optimal Brain Apoptosis; Sun et al., 2025): pruning by the second-order term of the loss.

Removing parameters changes the loss, to second order, by θ_i · (Hθ)_i each, with H the Hessian of
the mean loss and θ all the parameters that may go. Hθ needs no Hessian: it is the gradient of
(gradient · θ).
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from ..models.auto import check_has_no_adapters, is_hydra_class
from ..models.inputs import evaluation_mode
from .gradient_scores import Calibration, only_gradients_of
from .head_weights import by_head, columns_by_head, heads_to_score, rows_by_head
from .heads import Head, Prompts, Towers


def oba_scores(
    model: PreTrainedModel, data: Any, *, class_prompts: Prompts | None = None, towers: Towers | None = None
) -> dict[Head, float]:
    """Return the OBA score of every head.

    It is |Σ θ · (Hθ)| over the head's rows of q, k and v with their biases and its part of the
    output projection, where θ is all of these of all heads.

    Args:
        model, data, class_prompts, towers: as for `taylor_scores`, like the result.

    Each batch takes a backward pass through a backward pass, and about three times the memory. The
    OBA paper scores single weights, not heads: see `oba_prune`.
    """
    hydra, heads, attentions = heads_to_score(model, towers)
    calibration = Calibration(hydra, data, class_prompts)

    # The parameters of each layer's heads, and how their entries are grouped by head.
    parts = []
    for layer, attention in attentions.items():
        parts.append((layer, rows_by_head, attention.qkv_proj.weight))
        if attention.qkv_proj.bias is not None:
            parts.append((layer, rows_by_head, attention.qkv_proj.bias))
        parts.append((layer, columns_by_head, attention.o_proj.weight))

    # Sum the changes of each head.
    changes = second_order_changes(hydra, calibration, [parameter for _, _, parameter in parts])
    sums: dict[tuple, Tensor] = {}
    for (layer, group_by_head, _), change in zip(parts, changes, strict=True):
        grouped = group_by_head(change, attentions[layer])
        sums[layer] = sums.get(layer, 0) + grouped.sum(dim=(0, 2))
    scores = {layer: total.abs() for layer, total in sums.items()}
    return by_head(heads, scores)


@torch.no_grad()
def oba_prune(
    model: PreTrainedModel,
    data: Any,
    *,
    sparsity: float,
    score: str = "plain",
    steps: int = 1,
    class_prompts: Prompts | None = None,
) -> PreTrainedModel:
    """Return a copy of `model` in which the weights with the lowest OBA scores are zero.

    This is the paper's baseline. The copy keeps all heads and costs as much as the model.

    Args:
        model (`PreTrainedModel`): a classifier or a CLIP model of Transformers, of any family.
        data (`DataLoader`, `Dataset` or `list`): calibration data with labels, as `taylor_scores`
            takes it.
        sparsity (`float`): the share of weights that become zero, among the weights of all linear
            and convolutional layers of the encoder. Biases, LayerNorms, embeddings and the
            classification head stay.
        score (`str`, defaults to `"plain"`): "plain" ranks by |θ · Hθ|. "reference" ranks as the
            authors' code does: |θ · Hθ| over its maximum in the layer, plus |θ|; that is close to a
            ranking by magnitude.
        steps (`int`, defaults to 1): how many times scores are computed; each step keeps the same
            share of the weights that are left. The authors take about 50.
        class_prompts (`dict`, *optional*): for CLIP and SigLIP, the tokenizer's output with one row
            per class.

    In training, zeros stay zero with the recipe's `keep_zeros=True`, or with `KeepZerosCallback`.
    """
    is_share = isinstance(sparsity, (int, float)) and 0 <= sparsity < 1
    if not is_share or score not in ("plain", "reference") or not (isinstance(steps, int) and steps >= 1):
        raise ValueError(
            f"sparsity is {sparsity}, score {score!r} and steps {steps!r}: pass a share from 0 to below 1, one of "
            "'plain', 'reference', and 1 step or more"
        )
    if not isinstance(model, PreTrainedModel) or is_hydra_class(type(model)):
        raise TypeError(f"model is a {type(model).__name__}: pass a plain model of Transformers")
    check_has_no_adapters(model, "model")

    # The result in the model's dtype, and a copy to score on with more digits.
    pruned = copy.deepcopy(model)
    working = copy.deepcopy(model)
    if working.dtype != torch.float64:
        working = working.float()
    working = working.eval()
    calibration = Calibration(working, data, class_prompts)
    weights = ranked_weights(working)
    if not weights:
        raise TypeError(f"the encoder of {type(model).__name__} has no linear layer or convolution to rank")
    sizes = [weight.numel() for weight in weights]

    for step in range(1, steps + 1):
        # Score the weights that are left. Those that became zero in an earlier step stay zero,
        # whatever their score.
        changes = second_order_changes(working, calibration, weights)
        scores_of_weights = []
        for weight, change in zip(weights, changes, strict=True):
            scores_of_weights.append(_score(weight, change, score).flatten())
        scores = torch.cat(scores_of_weights)
        if scores.isnan().any():
            raise ValueError("some OBA scores are NaN: check the model's weights and the data")
        values = torch.cat([weight.flatten() for weight in weights])
        scores[values == 0] = -1

        # Zero the lowest; each step keeps the same share of what is left.
        share_gone = 1 - (1 - sparsity) ** (step / steps)
        lowest = scores.topk(round(sum(sizes) * share_gone), largest=False).indices
        is_gone = torch.zeros_like(scores, dtype=torch.bool)
        is_gone[lowest] = True
        for weight, mask in zip(weights, is_gone.split(sizes), strict=True):
            weight.masked_fill_(mask.view_as(weight), 0)

    for weight, pruned_weight in zip(weights, ranked_weights(pruned), strict=True):
        pruned_weight.masked_fill_(weight == 0, 0)
    return pruned


def ranked_weights(model: PreTrainedModel) -> list[nn.Parameter]:
    """Return the weights of the encoder's linear and convolutional layers.

    For CLIP these are the weights of both towers and of the projections.
    """
    # The base model of a classifier on one of two towers is the whole model, its head included.
    classifier = getattr(model, "classifier", None)
    classifier_modules = set()
    if isinstance(classifier, nn.Module):
        classifier_modules = set(classifier.modules())

    weights = {}  # by id, because a weight may be shared
    for module in model.base_model.modules():
        if module not in classifier_modules and isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d)):
            weights[id(module.weight)] = module.weight
    return list(weights.values())


def _score(weight: Tensor, change: Tensor, score: str) -> Tensor:
    """Return the scores of a layer's weights from their second-order changes."""
    size = change.abs()
    if score == "plain":
        return size
    largest = size.max()
    if largest > 0:
        size = size / largest
    return size + weight.abs()


def second_order_changes(
    model: PreTrainedModel, calibration: Calibration, parameters: Sequence[nn.Parameter]
) -> list[Tensor]:
    """Return θ · (Hθ) for every entry of θ = `parameters`.

    H is the Hessian of the mean loss over all rows.
    """
    sums = [torch.zeros_like(parameter) for parameter in parameters]
    values = [parameter.detach().clone() for parameter in parameters]
    twice = _differentiable_twice(model)
    with only_gradients_of(model, parameters), evaluation_mode(model), twice, torch.enable_grad():
        for loss in calibration.losses(model):
            # gradient · θ, whose gradient is Hθ
            gradients = torch.autograd.grad(loss, parameters, create_graph=True, materialize_grads=True)
            products = [(gradient * value).sum() for gradient, value in zip(gradients, values, strict=True)]
            along = sum(products)
            hessian_products = torch.autograd.grad(along, parameters, materialize_grads=True)
            for total, value, product in zip(sums, values, hessian_products, strict=True):
                total += value * product
    return sums


@contextmanager
def _differentiable_twice(model: PreTrainedModel) -> Iterator[None]:
    """Run attention as plain products: fused kernels have no second derivative.

    A model without sdpa runs eagerly.
    """
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    before = [(config, config._attn_implementation) for config in configs.values()]
    implementation = "eager"
    if model._supports_sdpa:
        implementation = "sdpa"
    for config in configs.values():
        config._attn_implementation = implementation
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        for config, implementation in before:
            config._attn_implementation = implementation
