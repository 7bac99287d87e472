"""Taylor pruning (D.1.1): heads scored by how much the loss would change, to first order, without their weights."""

import inspect
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.files import parse_json, write_atomically
from ..data.batches import batches, split_labels
from ..data.evaluation_data import check_label_range
from ..data.prediction import accepted_inputs, check_class_prompts, classes_of, logits_of_cosines
from ..fusion import qkv_by_head
from .heads import (
    Head,
    as_heads,
    as_heads_to_prune,
    attention_of,
    check_count,
    has_two_towers,
    heads_of,
    prune_heads,
    tower_and_place,
)


SCOPES = ("layer", "global")


@dataclass
class TaylorPruning:
    """The heads that Taylor pruning cuts, and the score of every head when it was decided on.

    heads_to_prune: as `prune_heads` takes it
    scores: by head, `(layer, head)` or for CLIP `(tower, layer, head)`
    heads_per_layer: how many heads a layer keeps; with the scope "global" on average
    scope: "layer" or "global"
    """

    heads_to_prune: dict
    scores: dict[Head, float]
    heads_per_layer: int
    scope: str

    def save(self, path: str | os.PathLike) -> None:
        """Writes the pruning as JSON, whole or not at all."""
        fields = {
            "heads_per_layer": self.heads_per_layer,
            "scope": self.scope,
            "scores": [[*head, score] for head, score in self.scores.items()],
            "pruned": as_heads(self.heads_to_prune),
        }
        write_atomically(path, json.dumps(fields, indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "TaylorPruning":
        try:
            fields = parse_json(Path(path).read_bytes())
            scores = {tuple(head): score for *head, score in fields["scores"]}
            heads_to_prune = as_heads_to_prune(tuple(head) for head in fields["pruned"])
            return cls(heads_to_prune, scores, fields["heads_per_layer"], fields["scope"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is no Taylor pruning ({error}): pass a file that save() wrote") from error


def taylor_scores(
    model: PreTrainedModel,
    data: Any,
    *,
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
) -> dict[Head, float]:
    """The Taylor score of every head: the mean of |W · G| over its rows of q, k and v, averaged over the three.
    A key and value that several heads read counts for each of them.

    G is the gradient of the mean loss over the whole of `data`, so the batch size leaves no trace. `model` is left
    as it is. The loss is the model's own; for CLIP, the cross-entropy of zero-shot classification.

    Args:
        model: a classifier or a CLIP model of Transformers, or a one-member Hydra of one.
        data: calibration data with labels: a DataLoader, a list of dict batches, or a Dataset or list of dict
            rows.
        class_prompts: for CLIP and SigLIP, the tokenizer's output with one row per class.
        towers: for CLIP, the towers to score; by default the vision tower only, because scores of the two towers are not
            on one scale.

    Returns `{(layer, head): score}`, for CLIP `{(tower, layer, head): score}`.
    """
    hydra = working_copy(model)
    calibration = Calibration(hydra, data, class_prompts)
    return _scores(hydra, calibration, heads_of(hydra, settled_towers(hydra, towers)))


def taylor_prune(
    model: PreTrainedModel,
    data: Any,
    *,
    heads_per_layer: int,
    scope: str = "layer",
    class_prompts: Mapping[str, Tensor] | None = None,
    towers: Sequence[str] | None = None,
    trunk_layers: int = 0,
) -> TaylorPruning:
    """Chooses the heads with the lowest Taylor scores; `prune_heads(model, pruning.heads_to_prune)` cuts them out.

    Args:
        model, data, class_prompts, towers: as for `taylor_scores`.
        heads_per_layer: how many heads each layer KEEPS (the paper's 8 of 12).
        scope: "layer" prunes the first layer, computes the scores of the second anew, prunes it, and so on. "global" ranks
            the heads of all layers together, once, and prunes as many as "layer" would; layers then keep
            `heads_per_layer` heads on average, and one may lose all of its heads.

        trunk_layers: how many first layers keep all their heads, for members that have them in common.

    Ties go to the lower layer and head. A layer that has no more than `heads_per_layer` heads loses none.
    """
    if scope not in SCOPES:
        raise ValueError(f"scope is {scope!r}: pass one of {', '.join(map(repr, SCOPES))}")
    hydra = working_copy(model)
    heads = heads_of(hydra, settled_towers(hydra, towers), trunk_layers)
    most = max((len(of_layer) for of_layer in _by_layer(heads)), default=0)
    check_count(heads_per_layer, "heads_per_layer", 1, most, "it says how many heads to keep")
    calibration = Calibration(hydra, data, class_prompts)
    if scope == "global":
        scores = _scores(hydra, calibration, heads)
        surplus = sum(max(0, len(of_layer) - heads_per_layer) for of_layer in _by_layer(heads))
        return TaylorPruning(as_heads_to_prune(_lowest(scores, surplus)), scores, heads_per_layer, scope)

    pruned, scores = [], {}
    for of_layer in _by_layer(heads):
        layer_scores = _scores(hydra, calibration, of_layer)
        lowest = _lowest(layer_scores, len(of_layer) - heads_per_layer)
        hydra = prune_heads(hydra, as_heads_to_prune(lowest))
        pruned += lowest
        scores |= layer_scores
    return TaylorPruning(as_heads_to_prune(pruned), scores, heads_per_layer, scope)


def working_copy(model: PreTrainedModel) -> PreTrainedModel:
    """A one-member Hydra of its own, in at least float32: sums of gradients need the digits."""
    hydra = prune_heads(model)
    return hydra if hydra.dtype == torch.float64 else hydra.float()


def settled_towers(hydra: PreTrainedModel, towers: Sequence[str] | None) -> Sequence[str] | None:
    if towers is None and has_two_towers(hydra):
        return ["vision"]
    return towers


def _by_layer(heads: Sequence[Head]) -> list[list[Head]]:
    layers: dict[tuple, list[Head]] = {}
    for head in heads:
        layers.setdefault(head[:-1], []).append(head)
    return list(layers.values())


def _lowest(scores: Mapping[Head, float], count: int) -> list[Head]:
    return sorted(scores, key=scores.__getitem__)[: max(0, count)]


def _scores(hydra: PreTrainedModel, calibration: "Calibration", heads: Sequence[Head]) -> dict[Head, float]:
    """Scores of `heads`; gradients are computed for the layers of these heads only."""
    attentions = {head[:-1]: attention_of(hydra, *tower_and_place(head)[:2]) for head in heads}
    weights = [attention.qkv_proj.weight for attention in attentions.values()]
    gradients = calibration.gradients(hydra, weights)
    of_layers = {}
    for (layer, attention), weight, gradient in zip(attentions.items(), weights, gradients, strict=True):
        # (q, k, v; heads; head_dim; hidden) -> one mean per head
        products = qkv_by_head((weight.detach() * gradient).abs(), attention)
        of_layers[layer] = iter(products.mean(dim=(0, 2, 3)).tolist())
    scores = {head: next(of_layers[head[:-1]]) for head in heads}
    for head, score in scores.items():
        if score != score:
            raise ValueError(f"the Taylor score of head {head} is NaN: check the model's weights and the data")
    return scores


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
