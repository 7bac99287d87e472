"""Data that is evaluated many times: read once, checked, and kept on the device."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._io.processes import check_can_be_shared, gather, gather_batches, raise_everywhere, rank_and_world_size
from ..data.batches import batches, split_labels
from ..data.fingerprints import fingerprints_of_rows


@dataclass
class EvaluationData:
    """This process's batches, and facts about the rows of all processes."""

    name: str
    inputs: list[dict[str, Tensor]] = field(default_factory=list)
    labels: list[Tensor | None] = field(default_factory=list)
    num_samples: int = 0
    fingerprint: str = ""
    input_digests: list[bytes] = field(default_factory=list)
    classes: list[int] = field(default_factory=list)

    def description(self) -> dict[str, Any]:
        return {"samples": self.num_samples, "fingerprint": self.fingerprint}


def read_data(
    data: Any,
    name: str,
    input_names: Sequence[str],
    batch_size: int,
    device: torch.device,
    dtype: torch.dtype,
    num_classes: int | None,
    any_labels: bool = False,
) -> EvaluationData:
    """Reads `data` once. In a group of W processes, process r keeps the batches r, r + W, ..., as a single process cuts them.

    input_names: the inputs that the model takes, the main one first
    num_classes: how many classes the labels have; None leaves labels out
    any_labels: take labels of any kind, one entry per row
    """
    check_can_be_shared(data, name)
    rank, world_size = rank_and_world_size()
    result, digests, input_digests, error = EvaluationData(name), [], [], None
    try:
        for batch in batches(data, batch_size, None, rank, world_size):
            inputs, labels = split_labels(batch)
            if input_names[0] not in inputs:
                raise ValueError(f"{name} has no {input_names[0]}, which the model reads (it has {', '.join(batch)})")
            inputs = {key: inputs[key] for key in input_names if key in inputs}
            labels = None if num_classes is None else labels
            if num_classes is not None:
                _check_labels(labels, len(inputs[input_names[0]]), name, None if any_labels else num_classes)
            input_digests.append(fingerprints_of_rows(inputs))
            digests.append(fingerprints_of_rows(inputs if labels is None else {**inputs, "labels": labels}))
            dtypes = {key: dtype if tensor.is_floating_point() else tensor.dtype for key, tensor in inputs.items()}
            result.inputs.append({key: tensor.to(device, dtypes[key]) for key, tensor in inputs.items()})
            result.labels.append(None if labels is None else labels.to(device))
    except (TypeError, ValueError) as raised:
        error = raised
    raise_everywhere(error)
    rows = [row for of_batch in gather_batches(digests) for row in of_batch]
    if not rows:
        raise ValueError(f"{name} has no samples: pass at least one batch")
    result.num_samples, result.fingerprint = len(rows), hashlib.sha256(b"".join(rows)).hexdigest()
    result.input_digests = [row for of_batch in gather_batches(input_digests) for row in of_batch]
    are_classes = [labels for labels in result.labels if labels is not None and not labels.is_floating_point()]
    by_process = gather({label for labels in are_classes for label in labels.unique().tolist()})
    result.classes = sorted(set().union(*by_process))
    return result


def _check_labels(labels: Tensor | None, rows: int, name: str, num_classes: int | None) -> None:
    """num_classes: None for labels of any kind"""
    if labels is None or len(labels) != rows:
        raise ValueError(
            f"{name} has no labels: give every batch what the metric compares with, or class indices, as 'labels', one for each of "
            f"its {rows} rows"
        )
    if num_classes is None:
        return
    if labels.is_floating_point() or labels.dim() != 1:
        raise ValueError(
            f"the labels of {name} are {labels.dtype} of shape {tuple(labels.shape)}: pass class indices, one integer for each of "
            f"the {rows} rows"
        )
    check_label_range(labels, name, num_classes)


def check_label_range(labels: Tensor, name: str, num_classes: int) -> None:
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        raise ValueError(f"{name} has the label {int(outside[0])}: the model's classes are 0 to {num_classes - 1}")
