"""The loss of a model on calibration data, and its gradients in chosen parameters."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data.batches import batches, split_labels
from ..data.evaluation_data import check_label_range
from ..data.prediction import accepted_inputs, check_class_prompts, classes_of, logits_of_cosines
from .heads import has_two_towers


class Calibration:
    """The calibration set, read once, and the gradient of the mean loss over all of it."""

    def __init__(self, hydra: PreTrainedModel, data: Any, class_prompts: Mapping[str, Tensor] | None):
        self.batches = []
        for batch in batches(data, device=hydra.device, classes=classes_of(hydra)):
            inputs, labels = split_labels(batch)
            if labels is None:
                raise ValueError("data has no labels: scores need the loss, give every batch its 'labels'")
            self.batches.append((accepted_inputs(hydra, inputs), labels))
        if not self.batches:
            raise ValueError("data has no samples: pass at least one batch")
        self.rows = sum(len(labels) for _, labels in self.batches)
        self.prompts = None
        if has_two_towers(hydra):
            check_class_prompts(class_prompts, hydra)
            prompts = {name: value.to(hydra.device) for name, value in class_prompts.items()}
            self.prompts = accepted_inputs(hydra.text_model, prompts)
        elif class_prompts is not None:
            raise ValueError(f"class_prompts is for CLIP and SigLIP, model is a {type(hydra).__name__}: leave it out")
        elif "labels" not in inspect.signature(hydra.forward).parameters:
            raise TypeError(f"{type(hydra).__name__} has no classifier: pass the model with its classification head")
        num_classes = hydra.config.num_labels if self.prompts is None else len(self.prompts["input_ids"])
        for _, labels in self.batches:
            # Floats are targets of multi-label problems and regression; one "class" is regression too.
            if num_classes > 1 and not labels.is_floating_point():
                check_label_range(labels, "data", num_classes)

    def gradients(self, hydra: PreTrainedModel, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        """The gradient of the mean loss in each of `parameters`."""
        with only_gradients_of(hydra, parameters), torch.enable_grad():
            if self.prompts is None:
                self._backward_classifier(hydra)
            else:
                self._backward_zero_shot(hydra)
            return [
                torch.zeros_like(parameter) if parameter.grad is None else parameter.grad for parameter in parameters
            ]

    def losses(self, model: PreTrainedModel) -> Iterator[Tensor]:
        """The mean loss in parts, one per batch, each with its own graph: their sum is the mean over all rows."""
        for inputs, labels in self.batches:
            if self.prompts is None:
                # A batch counts by its rows, so that a short last batch weighs no more than its share.
                yield model(**inputs, labels=labels).loss * (len(labels) / self.rows)
            else:
                texts = nn.functional.normalize(model.get_text_features(**self.prompts).pooler_output, dim=-1)
                yield self._zero_shot_loss(model, inputs, texts, labels)

    def _zero_shot_loss(self, model: PreTrainedModel, inputs: dict, texts: Tensor, labels: Tensor) -> Tensor:
        """A batch's part of the mean cross-entropy; texts: the prompts' features of length 1, (classes, features)"""
        images = model.get_image_features(pixel_values=inputs["pixel_values"]).pooler_output
        logits = logits_of_cosines(model, nn.functional.normalize(images, dim=-1) @ texts.t())
        return nn.functional.cross_entropy(logits, labels, reduction="sum") / self.rows

    def _backward_classifier(self, hydra: PreTrainedModel) -> None:
        for loss in self.losses(hydra):
            loss.backward()

    def _backward_zero_shot(self, hydra: PreTrainedModel) -> None:
        texts = nn.functional.normalize(hydra.get_text_features(**self.prompts).pooler_output, dim=-1)
        # The prompts go through the text tower once: their gradient is collected over the batches and passed on at the end.
        collected = texts.detach().requires_grad_()
        for inputs, labels in self.batches:
            self._zero_shot_loss(hydra, inputs, collected, labels).backward()
        if texts.requires_grad:
            texts.backward(collected.grad)


@contextmanager
def only_gradients_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients, fresh ones, for `parameters` alone; the rest of the graph is not built."""
    wanted = {id(parameter) for parameter in parameters}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in wanted)
        parameter.grad = None
    yield
    for parameter in model.parameters():
        parameter.grad = None
