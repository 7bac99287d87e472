"""Scores from gradients of the calibration loss: Taylor (D.1.1) and Michel et al. (2019)."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.progress import progress_bar, with_progress_bar
from ..data.batches import batches, split_labels
from ..data.prediction import accepted_inputs
from ..data.tags import NO_TAG
from ..data.zero_shot import check_class_prompts, logits_of_cosines
from ..fusion.structure import has_two_towers
from ..models.task import classifies_tokens
from .evaluation_data import check_label_range
from .head_weights import Layer, by_head, heads_to_score, rows_by_head
from .heads import Head, Prompts, Towers


def taylor_scores(
    model: PreTrainedModel, data: Any, *, class_prompts: Prompts | None = None, towers: Towers | None = None
) -> dict[Head, float]:
    """Return the Taylor score of every head.

    It is the mean of |W · G| over the head's rows of q, k and v, averaged over the three. Keys and
    values that several heads read count for each of them.

    G is the gradient of the mean loss over all of `data`, whatever the batch size. The loss is the
    model's own; for CLIP, the cross-entropy of zero-shot classification. `model` stays as it is.

    Args:
        model (`PreTrainedModel`): a classifier or a CLIP model of Transformers, or a one-member
            Hydra of one.
        data (`DataLoader`, `Dataset` or `list`): calibration data with labels, in dict batches or
            rows.
        class_prompts (`dict`, *optional*): for CLIP and SigLIP, the tokenizer's output with one row
            per class.
        towers (`Sequence[str]`, *optional*): for CLIP, the towers to score; by default the vision
            tower only, because scores of the two towers are not on one scale.

    Returns `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`.
    """
    hydra, heads, attentions = heads_to_score(model, towers)
    calibration = Calibration(hydra, data, class_prompts)
    with progress_bar(len(calibration.batches), "Taylor scores", "gradient") as bar:
        return by_head(heads, weight_times_gradient(hydra, calibration, attentions, bar.update))


def michel_scores(
    model: PreTrainedModel, data: Any, *, class_prompts: Prompts | None = None, towers: Towers | None = None
) -> dict[Head, float]:
    """Return the mean over the samples of |∂L(x) / ∂ξ|, where ξ = 1 multiplies the head's output.

    Each sample has its own gradient, so the batch size does not matter (`run_bertology.py` took the
    gradient of a batch). Arguments as for `taylor_scores`.
    """
    hydra, heads, attentions = heads_to_score(model, towers)
    calibration = Calibration(hydra, data, class_prompts)
    return by_head(heads, mean_gate_gradients(hydra, calibration, attentions))


def _labels_in(labels: Tensor) -> int:
    """Count the labels that the mean loss of a batch is over: one for each row, or tagged token."""
    are_tags = labels.dim() == 2 and not labels.is_floating_point()
    if are_tags:
        return int((labels != NO_TAG).sum())
    return len(labels)


class Calibration:
    """The calibration set, read once, and the mean loss over all of it."""

    def __init__(self, model: PreTrainedModel, data: Any, class_prompts: Prompts | None):
        # Batches of (inputs, labels), on the model's device.
        self.batches = []
        for batch in batches(data, device=model.device):
            inputs, labels = split_labels(batch)
            if labels is None:
                raise ValueError("data has no labels: scores need the loss, give every batch its 'labels'")
            self.batches.append((accepted_inputs(model, inputs), labels))
        if not self.batches:
            raise ValueError("data has no samples: pass at least one batch")
        self.rows = sum(_labels_in(labels) for _, labels in self.batches)

        # Class prompts, for models with two towers alone.
        self.prompts = None
        num_classes = model.config.num_labels
        if has_two_towers(model):
            check_class_prompts(class_prompts, model)
            prompts = {name: value.to(model.device) for name, value in class_prompts.items()}
            self.prompts = accepted_inputs(model.text_model, prompts)
            num_classes = len(self.prompts["input_ids"])
        elif class_prompts is not None:
            raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(model).__name__}: leave it out")
        elif "labels" not in inspect.signature(model.forward).parameters:
            raise TypeError(f"{type(model).__name__} has no classifier: pass the model with its classification head")

        # Labels are indices of classes. Float labels are multi-label or regression targets; so are
        # labels of a single "class".
        for _, labels in self.batches:
            if num_classes <= 1 or labels.is_floating_point():
                continue
            if classifies_tokens(model):
                labels = labels[labels != NO_TAG]
            check_label_range(labels, "data", num_classes)

    def losses(self, model: PreTrainedModel) -> Iterator[Tensor]:
        """Yield the mean loss in parts, one per batch, each with its own graph.

        The parts add up to the mean over all rows.
        """
        for inputs, labels in self.batches:
            if self.prompts is None:
                # Weighted by rows, so that a short last batch has its share only.
                share = _labels_in(labels) / self.rows
                yield model(**inputs, labels=labels).loss * share
            else:
                yield zero_shot_loss(model, inputs, labels, self.text_features(model)) / self.rows

    def text_features(self, model: PreTrainedModel) -> Tensor:
        """Return unit features of the class prompts, (classes, features)."""
        features = model.get_text_features(**self.prompts).pooler_output
        return nn.functional.normalize(features, dim=-1)

    def gradients(
        self, model: PreTrainedModel, parameters: Sequence[nn.Parameter], after_batch: Callable[[], Any]
    ) -> list[Tensor]:
        """Return the gradient of the mean loss in each of `parameters`.

        after_batch: called after each batch
        """
        with only_gradients_of(model, parameters), torch.enable_grad():
            if self.prompts is None:
                for loss in self.losses(model):
                    loss.backward()
                    after_batch()
            else:
                # The prompts pass the text tower once: their gradient is summed over the batches
                # and passed on at the end.
                texts = self.text_features(model)
                detached_texts = texts.detach().requires_grad_()
                for inputs, labels in self.batches:
                    loss = zero_shot_loss(model, inputs, labels, detached_texts) / self.rows
                    loss.backward()
                    after_batch()
                if texts.requires_grad:
                    texts.backward(detached_texts.grad)

            gradients = []
            for parameter in parameters:
                gradient = parameter.grad
                if gradient is None:
                    gradient = torch.zeros_like(parameter)
                gradients.append(gradient)
            return gradients


def zero_shot_loss(model: PreTrainedModel, inputs: Mapping[str, Tensor], labels: Tensor, texts: Tensor) -> Tensor:
    """Return the summed cross-entropy of images.

    texts: unit features of the prompts, (classes, features), or (rows, classes, features)
    """
    images = model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
    images = nn.functional.normalize(images, dim=-1)  # (rows, features)
    if texts.dim() == 2:
        cosines = images @ texts.t()
    else:
        cosines = (images.unsqueeze(1) @ texts.transpose(1, 2)).squeeze(1)
    logits = logits_of_cosines(model, cosines)  # (rows, classes)
    return nn.functional.cross_entropy(logits, labels, reduction="sum")


@contextmanager
def only_gradients_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Give fresh gradients to `parameters` alone; no graph is built for the others."""
    ids = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in ids)
        parameter.grad = None
    yield
    for parameter in model.parameters():
        parameter.grad = None


def weight_times_gradient(
    hydra: PreTrainedModel,
    calibration: Calibration,
    attentions: Mapping[Layer, nn.Module],
    after_batch: Callable[[], Any],
) -> dict[Layer, Tensor]:
    """Return, by layer, the mean |W · G| of each head, (heads,).

    after_batch: called after each batch of the calibration set
    """
    weights = {layer: attention.qkv_proj.weight for layer, attention in attentions.items()}
    gradients = calibration.gradients(hydra, list(weights.values()), after_batch)
    means = {}
    for (layer, weight), gradient in zip(weights.items(), gradients, strict=True):
        products = (weight.detach() * gradient).abs()
        by_projection = rows_by_head(products, attentions[layer])  # (q k v, heads, numbers)
        means[layer] = by_projection.mean(dim=(0, 2))
    return means


def mean_gate_gradients(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> dict[Layer, Tensor]:
    """Return, by layer, the mean over the samples of |gradient| in each head's gate, (heads,)."""
    gate_gradients = _classifier_gradients
    if calibration.prompts is not None:
        gate_gradients = _zero_shot_gradients
    sums: dict[Layer, Tensor] = {}
    with only_gradients_of(hydra, []), torch.enable_grad():
        gradients_of_batches = gate_gradients(hydra, calibration, attentions)
        for gradients in with_progress_bar(
            gradients_of_batches, len(calibration.batches), "Michel scores", "gradient"
        ):
            for layer, gradient in gradients.items():
                sums[layer] = sums.get(layer, 0) + gradient.abs().sum(dim=0)
    return {layer: total / calibration.rows for layer, total in sums.items()}


def _classifier_gradients(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> Iterator[dict[Layer, Tensor]]:
    """Yield, batch by batch, the gradient of each sample's loss in its own gates, (rows, heads)."""
    for inputs, labels in calibration.batches:
        with gates_on(attentions) as gates:
            mean_loss = hydra(**inputs, labels=labels).loss
        # A sample's loss depends on its own row of the gates only, so the gradient of the sum has
        # them all.
        summed_loss = mean_loss * _labels_in(labels)
        gradients = torch.autograd.grad(summed_loss, list(gates.values()))
        yield dict(zip(gates, gradients, strict=True))


def _zero_shot_gradients(
    hydra: PreTrainedModel, calibration: Calibration, attentions: Mapping[Layer, nn.Module]
) -> Iterator[dict[Layer, Tensor]]:
    """Yield, batch by batch, the gradient of each sample's loss in the gates, (rows, heads).

    All samples read the same prompts, so a gate of the text tower is one for all: the prompts pass
    the tower once, and each sample's gradient in their features is passed back through it.
    """
    with gates_on(_of_tower(attentions, "text"), is_common=True) as text_gates:
        texts = calibration.text_features(hydra)
    vision_attentions = _of_tower(attentions, "vision")
    for inputs, labels in calibration.batches:
        # A copy of the prompts' features for each row: (rows, classes, features).
        texts_of_rows = texts.detach().repeat(len(labels), 1, 1).requires_grad_()
        with gates_on(vision_attentions) as vision_gates:
            loss = zero_shot_loss(hydra, inputs, labels, texts_of_rows)
        in_texts, *in_vision_gates = torch.autograd.grad(loss, [texts_of_rows, *vision_gates.values()])
        gradients = dict(zip(vision_gates, in_vision_gates, strict=True))

        # Row by row through the text tower.
        if text_gates:
            in_text_gates = []
            for gradient in in_texts:
                of_row = torch.autograd.grad(texts, list(text_gates.values()), gradient, retain_graph=True)
                in_text_gates.append(of_row)
            for layer, *rows in zip(text_gates, *in_text_gates, strict=True):
                gradients[layer] = torch.cat(rows)
        yield gradients


def _of_tower(attentions: Mapping[Layer, nn.Module], tower: str) -> dict[Layer, nn.Module]:
    """Return those attentions that belong to a tower."""
    return {layer: attention for layer, attention in attentions.items() if layer[0] == tower}


@contextmanager
def gates_on(attentions: Mapping[Layer, nn.Module], is_common: bool = False) -> Iterator[dict[Layer, Tensor]]:
    """Multiply the outputs of heads by gates of 1, which the forward pass inside creates.

    Yields the gates by layer: (rows, heads), or (1, heads) where all rows share them.
    """
    gates: dict[Layer, Tensor] = {}

    def multiply_by_gates(layer: Layer, width: int) -> Callable:
        def multiply(_: nn.Module, args: tuple[Tensor]) -> Tensor:
            heads = args[0].unflatten(-1, (-1, width))  # (..., rows, tokens, heads, width)
            if layer not in gates:  # one for all the times that the layer runs
                rows = heads.shape[-4]
                if is_common:
                    rows = 1
                gates[layer] = heads.new_ones(rows, heads.shape[-2], requires_grad=True)
            gate = gates[layer][:, None, :, None]
            return (heads * gate).flatten(-2)

        return multiply

    with ExitStack() as hooks:
        for layer, attention in attentions.items():
            multiply = multiply_by_gates(layer, attention.head_dim)
            handle = attention.o_proj.register_forward_pre_hook(multiply)
            hooks.callback(handle.remove)
        yield gates
