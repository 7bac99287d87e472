"""The importance of Michel et al. (2019): how much the loss of a sample feels a gate on a head, or on a neuron."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.prediction import logits_of_cosines
from .calibration import Calibration, only_gradients_of
from .units import Layer, Unit, UnitLayer, UnitsOf, by_unit, head_layers, units_to_score


def michel_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    units_of: UnitsOf = head_layers,
) -> dict[Unit, float]:
    """The mean over the samples of |∂L(x) / ∂ξ|, with ξ a gate of 1 that multiplies what the head, or the neuron, gives.

    The gradient is that of each sample by itself, so the batch size leaves no trace (`run_bertology.py` took that of a
    batch). Arguments as for `taylor_scores`.
    """
    hydra, units, layers = units_to_score(model, towers, units_of)
    return by_unit(units, mean_gradients(hydra, Calibration(hydra, data, class_prompts), layers))


def mean_gradients(
    hydra: PreTrainedModel, calibration: Calibration, gated: Mapping[Layer, UnitLayer]
) -> dict[Layer, Tensor]:
    """By layer, the mean over the samples of the size of the gradient in each gate, (units,)."""
    gradients = _zero_shot_gradients if calibration.prompts is not None else _classifier_gradients
    sums: dict[Layer, Tensor] = {}
    with only_gradients_of(hydra, []), torch.enable_grad():
        for of_batch in gradients(hydra, calibration, gated):
            for layer, gradient in of_batch.items():
                sums[layer] = sums.get(layer, 0) + gradient.abs().sum(dim=0)
    return {layer: total / calibration.rows for layer, total in sums.items()}


def _classifier_gradients(
    hydra: PreTrainedModel, calibration: Calibration, gated: Mapping[Layer, UnitLayer]
) -> Iterator[dict[Layer, Tensor]]:
    """By layer, the gradients (rows, units) of the loss of each sample of a batch."""
    for inputs, labels in calibration.batches:
        with gates_on(gated) as gates:
            loss = hydra(**inputs, labels=labels).loss
        # A mean of losses, of which each knows its own row of the gates alone.
        yield _by_layer(gates, torch.autograd.grad(loss * len(labels), list(gates.values())))


def _zero_shot_gradients(
    hydra: PreTrainedModel, calibration: Calibration, gated: Mapping[Layer, UnitLayer]
) -> Iterator[dict[Layer, Tensor]]:
    """The same for the cross-entropy of zero-shot classification. A gate of the text tower is one for all prompts, which
    every sample reads: the prompts pass the tower once, and each sample's gradient in their features is passed on."""
    of_text = {layer: gated[layer] for layer in gated if layer[0] == "text"}
    of_vision = {layer: gated[layer] for layer in gated if layer[0] == "vision"}
    with gates_on(of_text, is_common=True) as text_gates:
        texts = nn.functional.normalize(hydra.get_text_features(**calibration.prompts).pooler_output, dim=-1)
    for inputs, labels in calibration.batches:
        with gates_on(of_vision) as gates:
            images = hydra.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        images = nn.functional.normalize(images, dim=-1).unsqueeze(1)
        own_texts = texts.detach().repeat(len(labels), 1, 1).requires_grad_()  # (rows, classes, features)
        logits = logits_of_cosines(hydra, (images @ own_texts.transpose(1, 2)).squeeze(1))
        loss = nn.functional.cross_entropy(logits, labels, reduction="sum")
        in_texts, *in_gates = torch.autograd.grad(loss, [own_texts, *gates.values()])
        found = _by_layer(gates, in_gates)
        if text_gates:
            rows = [torch.autograd.grad(texts, list(text_gates.values()), row, retain_graph=True) for row in in_texts]
            found |= _by_layer(text_gates, [torch.cat(of_layer) for of_layer in zip(*rows, strict=True)])
        yield found


def _by_layer(gates: Mapping[Layer, Tensor], gradients: Sequence[Tensor]) -> dict[Layer, Tensor]:
    return dict(zip(gates, gradients, strict=True))


@contextmanager
def gates_on(gated: Mapping[Layer, UnitLayer], is_common: bool = False) -> Iterator[dict[Layer, Tensor]]:
    """By layer, gates of 1, made in the forward pass inside: (rows, units), or (1, units) where all rows have one in common."""
    gates: dict[Layer, Tensor] = {}

    def put_on(layer: Layer, width: int):
        def multiply(_, given: tuple[Tensor]) -> Tensor:
            units = given[0].unflatten(-1, (-1, width))  # (..., rows, tokens, units, width)
            rows = 1 if is_common else units.shape[-4]
            gates[layer] = units.new_ones(rows, units.shape[-2], requires_grad=True)
            return (units * gates[layer][:, None, :, None]).flatten(-2)

        return multiply

    handles = []
    try:
        for layer, units in gated.items():
            handles.append(units.reader.register_forward_pre_hook(put_on(layer, units.width)))
        yield gates
    finally:
        for handle in handles:
            handle.remove()
