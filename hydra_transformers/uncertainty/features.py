"""Read each member's features while a model predicts: the inputs of its last linear map."""

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
    """Predict member logits (batch, members, classes) and, where asked for, features (batch,
    members, dim).

    Features are the inputs of the linear map whose outputs are the logits, of every member: of
    Hydras, Transformers classifiers, `ZeroShotClassifier` (the image's embedding, of length 1), and
    the `baselines` made of them. They are read on a copy that shares the weights: the model gets no
    hooks, and other threads may use it.
    """

    def __init__(self, model: nn.Module, with_features: bool = True):
        self.name = type(model).__name__
        self.with_features = with_features
        self.scalings: list[TemperatureScaling] = []  # in the order in which they are applied
        self.calls: dict[int, list[Call]] = {}  # by thread
        self.model = model
        if with_features:
            # The logits of the last linear map are those before any temperature.
            inside, scaling = _without_temperature(model)
            while inside is not model:
                model = inside
                self.scalings.insert(0, scaling)
                inside, scaling = _without_temperature(model)
            self.model = copy_sharing_weights(model)
            for module in _linear_maps(self.model):
                module.register_forward_hook(self._record)
        self.device = device_of(model)

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor | None]:
        features = None
        self.calls[threading.get_ident()] = []
        try:
            member_logits = predict(self.model, batch)
            if self.with_features:
                features = self._features(member_logits)
        finally:
            del self.calls[threading.get_ident()]  # they hold the batch's tensors
        for scaling in self.scalings:
            member_logits = scaling(member_logits)
        return member_logits, features

    def read(self, data: Any, batch_size: int) -> Iterator[tuple[dict, Tensor, Tensor | None]]:
        """Yield every batch of data with its member logits and features."""
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
        """Return the inputs of the calls that gave, in this order, the logits of all members."""
        members = member_logits.shape[1]
        found = 0
        features = []
        for call in self.calls[threading.get_ident()]:
            if found == members:
                break
            part = _features_of_call(call, member_logits[:, found:])
            if part is not None:
                features.append(part)
                found += part.shape[1]
        if found != members:
            raise ValueError(
                f"the logits of {self.name} are not the outputs of a linear map of each member, so it has no "
                "features that could be read (its head may be compiled, adapted or of another kind): use a detector "
                "that reads logits alone"
            )
        return torch.cat(features, dim=1)


def without_decision(model: nn.Module) -> tuple[nn.Module, Decision | None]:
    """Return a calibrated model without its decision, and the decision; None if that is not about
    this model.

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
    if not decision.is_current(inside):
        return inside, None
    return inside, decision


def _without_temperature(model: nn.Module) -> tuple[nn.Module, TemperatureScaling]:
    """Return a model whose logits are its linear map's outputs, and the temperature applied to
    them."""
    if isinstance(model, TemperatureScaledClassifier):
        return model.model, model.scaling
    inside, decision = without_decision(model)
    temperature = 1.0
    if decision is not None:
        temperature = typed_settings(decision.settings).temperature_or_one
    return inside, TemperatureScaling(temperature)


def _linear_maps(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose outputs may be logits: as wide as the config says, or all of
    them."""
    classes = getattr(config_inside(model), "num_labels", None)
    similarities = []
    linear_maps = []
    as_wide_as_logits = []
    for module in model.modules():
        if isinstance(module, PromptSimilarity):
            similarities.append(module)
        if isinstance(module, nn.Linear):
            widths = {module.out_features}
        elif isinstance(module, GroupedLinear):
            widths = set(module.widths)
        else:
            continue
        linear_maps.append(module)
        if widths == {classes}:
            as_wide_as_logits.append(module)
    return similarities + as_wide_as_logits or linear_maps


def _features_of_call(call: Call, member_logits: Tensor) -> Tensor | None:
    """Return a call's inputs (batch, its members, dim), if its outputs are the logits of the first
    of these members; None otherwise.

    member_logits: (batch, members, classes)
    """
    batch, members, classes = member_logits.shape
    features, logits = _by_row(call)
    if logits.dim() != 3 or logits.shape[-1] != classes:
        return None

    # Rows may be the batch several times over, once for each sample or member.
    times, left_over = divmod(logits.shape[0], batch)
    reads_every_token = isinstance(call.module, nn.Linear) and logits.shape[1] > 1
    members_of_call = times
    if not reads_every_token:
        members_of_call = times * logits.shape[1]
    if left_over or not 0 < members_of_call <= members:
        return None
    expected = member_logits[:, :members_of_call]

    # Of a map of every token, keep the one that gives the logits.
    if reads_every_token:
        expected_rows = expected.transpose(0, 1).flatten(0, 1).unsqueeze(1)
        is_answer = (logits.to(expected_rows.dtype) == expected_rows).all(dim=-1)  # (rows, tokens)
        if not is_answer.any(dim=1).all():
            return None
        token = is_answer.int().argmax(dim=1)
        row = torch.arange(len(token), device=token.device)
        features = features[row, token, None]
        logits = logits[row, token, None]

    features = _by_member(features, times, batch).to(expected.device)
    logits = _by_member(logits, times, batch).to(expected.device, expected.dtype)
    if torch.allclose(logits, expected, rtol=0, atol=0, equal_nan=True):
        return features
    return None


def _by_row(call: Call) -> tuple[Tensor, Tensor]:
    """Return a call's inputs (rows, members or tokens, dim) and outputs (rows, members or tokens,
    classes), where they are of a classifier; an output of other than three axes otherwise."""
    features = call.inputs[0]
    logits = call.output
    if isinstance(call.module, GroupedLinear):  # (members, rows, ...); 1 while members are equal
        if logits.dim() == 3:
            features = features.expand(logits.shape[0], -1, -1).transpose(0, 1)
            logits = logits.transpose(0, 1)
    elif isinstance(call.module, PromptSimilarity):
        features = features.expand(-1, logits.shape[1], -1)
    elif logits.dim() == 2:
        features = features.unsqueeze(1)
        logits = logits.unsqueeze(1)
    return features, logits


def _by_member(rows: Tensor, times: int, batch: int) -> Tensor:
    """(times * batch, members, ...) -> (batch, times * members, ...)"""
    return rows.unflatten(0, (times, batch)).transpose(0, 1).flatten(1, 2)


def collect_answers(
    model: nn.Module, data: Any, batch_size: int = 32, with_features: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Predict all of `data`, on the CPU: member logits (samples, members, classes), member features
    (samples, members, dim; `None` where not asked for) and labels (or `None`).

    For sets that fit in memory. `Detector.fit` and `Detector.score` read a data set of any size
    batch by batch.
    """
    reader = AnswerReader(model, with_features)
    all_logits = []
    all_features = []
    all_labels = []
    for batch, member_logits, features in reader.read(data, batch_size):
        all_logits.append(member_logits.cpu())
        if with_features:
            all_features.append(features.cpu())
        all_labels.append(labels_of(batch, len(member_logits)))
    joined_features = torch.cat(all_features) if with_features else None
    return torch.cat(all_logits), joined_features, joined_labels(all_labels)
