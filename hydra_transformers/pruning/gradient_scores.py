"""Scores from gradients of the calibration loss: Taylor (D.1.1) and Michel et al. (2019)."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import batches, split_labels
from ..data.prediction import accepted_inputs, classifies_tokens
from ..data.tags import NO_TAG
from ..data.zero_shot import check_class_prompts, logits_of_cosines
from .evaluation_data import check_label_range
from .head_weights import Layer, by_head, heads_to_score, rows_by_head
from .heads import Head, Prompts, Towers, has_two_towers


def taylor_scores(
    model: PreTrainedModel, data: Any, *, class_prompts: Prompts | None = None, towers: Towers | None = None
) -> dict[Head, float]:
    """The Taylor score of every head: the mean of |W · G| over its rows of q, k and v, averaged over the three.
    Keys and values that several heads read count for each of them.

    G is the gradient of the mean loss over all of `data`, whatever the batch size. The loss is the model's own; for CLIP, the
    cross-entropy of zero-shot classification. `model` stays as it is.

    Args:
        model (`PreTrainedModel`): a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data (`DataLoader`, `Dataset` or `list`): calibration data with labels, in dict batches or rows.
        class_prompts (`dict`, *optional*): for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers (`Sequence[str]`, *optional*): for CLIP, the towers to score; by default the vision tower only, because scores
            of the two towers are not on one scale.

    Returns `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`.
    """
    hydra, heads, attentions = heads_to_score(model, towers)
    return by_head(heads, weight_times_gradient(hydra, Calibration(hydra, data, class_prompts), attentions))


def michel_scores(
    model: PreTrainedModel, data: Any, *, class_prompts: Prompts | None = None, towers: Towers | None = None
) -> dict[Head, float]:
    """The mean over the samples of |∂L(x) / ∂ξ|, where ξ = 1 multiplies the head's output.

    Each sample has its own gradient, so the batch size does not matter (`run_bertology.py` took the gradient of a batch).
    Arguments as for `taylor_scores`.
    """
    hydra, heads, attentions = heads_to_score(model, towers)
    return by_head(heads, mean_gate_gradients(hydra, Calibration(hydra, data, class_prompts), attentions))


def _labels_in(labels: Tensor) -> int:
    """How many labels the mean loss of a batch is over: one for each row, or for each tagged token."""
    return int((labels != NO_TAG).sum()) if labels.dim() == 2 and not labels.is_floating_point() else len(labels)


class Calibration:
    """The calibration set, read once, and the mean loss over all of it."""

    def __init__(self, model: PreTrainedModel, data: Any, class_prompts: Prompts | None):
        self.batches = []
        for batch in batches(data, device=model.device):
            inputs, labels = split_labels(batch)
            if labels is None:
                raise ValueError("data has no labels: scores need the loss, give every batch its 'labels'")
            self.batches.append((accepted_inputs(model, inputs), labels))
        if not self.batches:
            raise ValueError("data has no samples: pass at least one batch")
        self.rows = sum(_labels_in(labels) for _, labels in self.batches)
        self.prompts = None
        if has_two_towers(model):
            check_class_prompts(class_prompts, model)
            prompts = {name: value.to(model.device) for name, value in class_prompts.items()}
            self.prompts = accepted_inputs(model.text_model, prompts)
        elif class_prompts is not None:
            raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(model).__name__}: leave it out")
        elif "labels" not in inspect.signature(model.forward).parameters:
            raise TypeError(f"{type(model).__name__} has no classifier: pass the model with its classification head")
        num_classes = model.config.num_labels if self.prompts is None else len(self.prompts["input_ids"])
        for _, labels in self.batches:
            # Float labels are multi-label or regression targets; so are labels of a single "class".
            if num_classes > 1 and not labels.is_floating_point():
                known = labels[labels != NO_TAG] if classifies_tokens(model) else labels
                check_label_range(known, "data", num_classes)

    def losses(self, model: PreTrainedModel) -> Iterator[Tensor]:
        """The mean loss in parts, one per batch, each with its own graph; they add up to the mean over all rows."""
        for inputs, labels in self.batches:
            if self.prompts is None:
                # Weighted by rows, so that a short last batch has its share only.
                yield model(**inputs, labels=labels).loss * (_labels_in(labels) / self.rows)
            else:
                yield zero_shot_loss(model, inputs, labels, self.text_features(model)) / self.rows

    def text_features(self, model: PreTrainedModel) -> Tensor:
        """Unit features of the class prompts, (classes, features)."""
        return nn.functional.normalize(model.get_text_features(**self.prompts).pooler_output, dim=-1)

    def gradients(self, model: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The gradient of the mean loss in each of `parameters`."""
        with only_gradients_of(model, parameters), torch.enable_grad():
            if self.prompts is None:
                for loss in self.losses(model):
                    loss.backward()
            else:
                # The prompts pass the text tower once: their gradient is summed over the batches and passed on at the end.
                texts = self.text_features(model)
                summed = texts.detach().requires_grad_()
                for inputs, labels in self.batches:
                    (zero_shot_loss(model, inputs, labels, summed) / self.rows).backward()
                if texts.requires_grad:
                    texts.backward(summed.grad)
            return [torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in parameters]


def zero_shot_loss(model: PreTrainedModel, inputs: Mapping[str, Tensor], labels: Tensor, texts: Tensor) -> Tensor:
    """The summed cross-entropy of images, for unit features `texts` (classes, features), or (rows, classes, features)."""
    images = model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
    images = nn.functional.normalize(images, dim=-1)
    cosines = images @ texts.t() if texts.dim() == 2 else (images.unsqueeze(1) @ texts.transpose(1, 2)).squeeze(1)
    return nn.functional.cross_entropy(logits_of_cosines(model, cosines), labels, reduction="sum")


@contextmanager
def only_gradients_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Fresh gradients for `parameters` alone; no graph is built for the others."""
    ids = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in ids)
        parameter.grad = None
    yield
    for parameter in model.parameters():
        parameter.grad = None


def weight_times_gradient(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> dict[Layer, Tensor]:
    """By layer, the mean |W · G| of each head, (heads,)."""
    weights = {layer: attention.qkv_proj.weight for layer, attention in attentions.items()}
    gradients = calibration.gradients(hydra, list(weights.values()))
    return {
        layer: rows_by_head((weight.detach() * gradient).abs(), attentions[layer]).mean(dim=(0, 2))
        for (layer, weight), gradient in zip(weights.items(), gradients, strict=True)
    }


def mean_gate_gradients(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> dict[Layer, Tensor]:
    """By layer, the mean over the samples of the absolute gradient in each head's gate, (heads,)."""
    gradients = _zero_shot_gradients if calibration.prompts is not None else _classifier_gradients
    sums: dict[Layer, Tensor] = {}
    with only_gradients_of(hydra, []), torch.enable_grad():
        for of_batch in gradients(hydra, calibration, attentions):
            for layer, gradient in of_batch.items():
                sums[layer] = sums.get(layer, 0) + gradient.abs().sum(dim=0)
    return {layer: total / calibration.rows for layer, total in sums.items()}


def _classifier_gradients(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> Iterator[dict[Layer, Tensor]]:
    """By layer, the gradient (rows, heads) of each sample's loss in its own gates, batch by batch."""
    for inputs, labels in calibration.batches:
        with gates_on(attentions) as gates:
            loss = hydra(**inputs, labels=labels).loss
        # A sample's loss depends on its own row of the gates only, so the gradient of the sum has them all.
        yield dict(zip(gates, torch.autograd.grad(loss * _labels_in(labels), list(gates.values())), strict=True))


def _zero_shot_gradients(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> Iterator[dict[Layer, Tensor]]:
    """The same for zero-shot classification. All samples read the same prompts, so a gate of the text tower is one for all:
    the prompts pass the tower once, and each sample's gradient in their features is passed back through it."""
    with gates_on(_of_tower(attentions, "text"), is_common=True) as text_gates:
        texts = calibration.text_features(hydra)
    for inputs, labels in calibration.batches:
        own_texts = texts.detach().repeat(len(labels), 1, 1).requires_grad_()  # (rows, classes, features)
        with gates_on(_of_tower(attentions, "vision")) as gates:
            loss = zero_shot_loss(hydra, inputs, labels, own_texts)
        in_texts, *in_gates = torch.autograd.grad(loss, [own_texts, *gates.values()])
        gradients = dict(zip(gates, in_gates, strict=True))
        if text_gates:
            rows = [torch.autograd.grad(texts, list(text_gates.values()), row, retain_graph=True) for row in in_texts]
            gradients |= {layer: torch.cat(parts) for layer, *parts in zip(text_gates, *rows, strict=True)}
        yield gradients


def _of_tower(attentions: Mapping[Layer, nn.Module], tower: str) -> dict[Layer, nn.Module]:
    return {layer: attention for layer, attention in attentions.items() if layer[0] == tower}


@contextmanager
def gates_on(attentions: Mapping[Layer, nn.Module], is_common: bool = False) -> Iterator[dict[Layer, Tensor]]:
    """By layer, gates of 1, created by the forward pass inside: (rows, heads), or (1, heads) where all rows share them."""
    gates: dict[Layer, Tensor] = {}

    def multiply_by_gates(layer: Layer, width: int) -> Callable:
        def multiply(_: nn.Module, args: tuple[Tensor]) -> Tensor:
            heads = args[0].unflatten(-1, (-1, width))  # (..., rows, tokens, heads, width)
            rows = 1 if is_common else heads.shape[-4]
            if layer not in gates:  # one for all the times that the layer runs
                gates[layer] = heads.new_ones(rows, heads.shape[-2], requires_grad=True)
            return (heads * gates[layer][:, None, :, None]).flatten(-2)

        return multiply

    with ExitStack() as hooks:
        for layer, attention in attentions.items():
            handle = attention.o_proj.register_forward_pre_hook(multiply_by_gates(layer, attention.head_dim))
            hooks.callback(handle.remove)
        yield gates
