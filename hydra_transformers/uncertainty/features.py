"""Reads each member's features while a model predicts: the inputs of its last linear map."""

import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from .._io.threads import copy_sharing_weights
from ..data.batches import batches, labels_of
from ..data.prediction import device_of, joined_labels, predict
from ..data.zero_shot import PromptSimilarity
from ..models.decision import Decision
from ..models.decision_settings import typed_settings
from ..models.modeling_hydra import GroupedLinear
from ..models.task import config_inside
from .temperature import TemperatureScaledClassifier, TemperatureScaling


class Call(NamedTuple):
    """One call of a linear map while a model predicted."""

    module: nn.Module
    inputs: tuple[Tensor, ...]
    output: Tensor


class AnswerReader:
    """Predicts member logits (batch, members, classes) and, where asked for, features (batch, members, dim).

    Features are the inputs of the linear map whose outputs are the logits, of every member: of Hydras, Transformers
    classifiers, `ZeroShotClassifier` (the image's embedding, of length 1), and the `baselines` made of them. They are read on a
    copy that shares the weights: the model gets no hooks, and other threads may use it.
    """

    def __init__(self, model: nn.Module, with_features: bool = True):
        self.name, self.with_features = type(model).__name__, with_features
        self.scalings: list[TemperatureScaling] = []
        self.calls: dict[int, list[Call]] = {}  # by thread
        while with_features and (inside := _without_temperature(model))[0] is not model:
            model, self.scalings = inside[0], [inside[1], *self.scalings]
        self.model = copy_sharing_weights(model) if with_features else model
        self.device = device_of(model)
        if with_features:
            for module in _linear_maps(self.model):
                module.register_forward_hook(self._record)

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        self.calls[threading.get_ident()] = []
        try:
            member_logits = predict(self.model, batch)
            features = self._features(member_logits) if self.with_features else None
        finally:
            del self.calls[threading.get_ident()]  # they hold the batch's tensors
        for scaling in self.scalings:
            member_logits = scaling(member_logits)
        return member_logits, features

    def read(self, data: Any, batch_size: int) -> Iterator[tuple[dict, Tensor, Tensor | None]]:
        """Every batch of data with its member logits and features."""
        is_empty = True
        for batch in batches(data, batch_size, self.device):
            is_empty = False
            yield batch, *self(batch)
        if is_empty:
            raise ValueError("data has no batches: pass at least one sample")

    def _record(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if inputs and isinstance(output, Tensor):
            self.calls[threading.get_ident()].append(Call(module, inputs, output))

    def _features(self, member_logits: Tensor) -> Tensor:
        """The inputs of the calls that gave, in this order, the logits of all members."""
        members, count, features = member_logits.shape[1], 0, []
        for call in self.calls[threading.get_ident()]:
            part = None if count == members else _read(call, member_logits[:, count:])
            if part is not None:
                features.append(part)
                count += part.shape[1]
        if count != members:
            raise ValueError(
                f"the logits of {self.name} are not the outputs of a linear map of each member, so it has no features that "
                "could be read (its head may be compiled, adapted or of another kind): use a detector that reads logits alone"
            )
        return torch.cat(features, dim=1)


def without_decision(model: nn.Module) -> tuple[nn.Module, Decision | None]:
    """A calibrated model without its decision, and the decision; None if it is not about this model.

    A Hydra is copied, sharing its weights, so that other threads still get decisions.
    """
    decision = dict(model.named_children()).get("decision")  # its own: PEFT's wrappers pass on attributes
    if not hasattr(decision, "is_current"):
        return model, None
    if isinstance(model, PreTrainedModel):
        inside = copy_sharing_weights(model)
        inside.decision = None
    else:
        inside = model.model
    return inside, decision if decision.is_current(inside) else None


def _without_temperature(model: nn.Module) -> tuple[nn.Module, TemperatureScaling]:
    """A model whose logits are its linear map's outputs, and the temperature applied to them."""
    if isinstance(model, TemperatureScaledClassifier):
        return model.model, model.scaling
    inside, decision = without_decision(model)
    return inside, TemperatureScaling(
        1.0 if decision is None else typed_settings(decision.settings).temperature_or_one
    )


def _linear_maps(model: nn.Module) -> list[nn.Module]:
    """The modules whose outputs may be logits: as wide as the config says, or all of them."""
    classes = getattr(config_inside(model), "num_labels", None)
    widths = {
        module: {module.out_features} if isinstance(module, nn.Linear) else set(module.widths)
        for module in model.modules()
        if isinstance(module, (nn.Linear, GroupedLinear))
    }
    as_wide = [module for module, width in widths.items() if width == {classes}]
    similarities = [module for module in model.modules() if isinstance(module, PromptSimilarity)]
    return similarities + as_wide or list(widths)


def _read(call: Call, member_logits: Tensor) -> Tensor | None:
    """A call's inputs (batch, its members, dim), if its outputs are the logits of the first of these members."""
    batch, members, classes = member_logits.shape
    inputs, output = call.inputs[0], call.output
    if isinstance(call.module, GroupedLinear):  # (members, rows, ...); 1 while members are equal
        if output.dim() != 3:
            return None
        inputs, output = inputs.expand(output.shape[0], -1, -1).transpose(0, 1), output.transpose(0, 1)
    elif isinstance(call.module, PromptSimilarity):
        inputs = inputs.expand(-1, output.shape[1], -1)
    elif output.dim() == 2:
        inputs, output = inputs.unsqueeze(1), output.unsqueeze(1)
    # Rows may be the batch several times over, once for each sample.
    times, left = divmod(output.shape[0], batch)
    by_token = isinstance(call.module, nn.Linear) and output.dim() == 3 and output.shape[1] > 1
    count = times if by_token else times * output.shape[1]
    if output.dim() != 3 or output.shape[-1] != classes or left or not 0 < count <= members:
        return None
    expected = member_logits[:, :count]
    if by_token:  # a map of every token, one of which gives the logits
        rows = expected.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        is_answer = (output.to(rows.dtype) == rows).all(dim=-1)  # (rows, tokens)
        if not is_answer.any(dim=1).all():
            return None
        place = is_answer.int().argmax(dim=1)
        inputs, output = (part[torch.arange(len(part), device=part.device), place, None] for part in (inputs, output))
    inputs, output = (
        part.unflatten(0, (times, batch)).transpose(0, 1).flatten(1, 2).to(expected.device)
        for part in (inputs, output)
    )
    is_same = torch.allclose(output.to(expected.dtype), expected, rtol=0, atol=0, equal_nan=True)
    return inputs if is_same else None


def collect_answers(
    model: nn.Module, data: Any, batch_size: int = 32, with_features: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Predict all of `data`, on the CPU: member logits (samples, members, classes), member features (samples, members, dim;
    `None` where not asked for) and labels (or `None`).

    For sets that fit in memory. `Detector.fit` and `Detector.score` read a data set of any size batch by batch.
    """
    reader, parts = AnswerReader(model, with_features), []
    for batch, member_logits, features in reader.read(data, batch_size):
        labels = labels_of(batch, len(member_logits))
        parts.append((member_logits.cpu(), features.cpu() if with_features else None, labels))
    all_logits, all_features, labels = zip(*parts, strict=True)
    return torch.cat(all_logits), torch.cat(all_features) if with_features else None, joined_labels(labels)
