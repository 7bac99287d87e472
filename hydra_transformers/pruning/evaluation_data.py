"""Data that is evaluated many times: read once, checked, and kept on the device."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
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
        """Return what a circuit records of its data."""
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
    """Read `data` once.

    In a group of W processes, process r keeps the batches r, r + W, ..., as a single process cuts
    them.

    Args:
        data: batches, or rows that are put into batches of `batch_size`
        name: what errors call the data
        input_names: the inputs that the model takes, the main one first
        device, dtype: of the model; inputs are moved there, and numbers that are not whole become
            `dtype`
        num_classes: how many classes the labels have; None leaves labels out
        any_labels: take labels of any kind, one entry per row
    """
    check_can_be_shared(data, name)
    rank, world_size = rank_and_world_size()
    result = EvaluationData(name)
    row_digests = []
    input_digests = []
    error = None

    # Read this process's batches. All processes stop if one meets an error.
    main_input = input_names[0]
    classes_to_check = None if any_labels else num_classes
    try:
        for batch in batches(data, batch_size, None, rank, world_size):
            inputs, labels = split_labels(batch)
            if main_input not in inputs:
                raise ValueError(f"{name} has no {main_input}, which the model reads (it has {', '.join(batch)})")
            inputs = {key: inputs[key] for key in input_names if key in inputs}
            if num_classes is None:
                labels = None
            else:
                _check_labels(labels, len(inputs[main_input]), name, classes_to_check)

            digested = inputs
            if labels is not None:
                digested = {**inputs, "labels": labels}
            input_digests.append(fingerprints_of_rows(inputs))
            row_digests.append(fingerprints_of_rows(digested))

            moved = {}
            for key, tensor in inputs.items():
                target = dtype if tensor.is_floating_point() else tensor.dtype
                moved[key] = tensor.to(device, target)
            if labels is not None:
                labels = labels.to(device)
            result.inputs.append(moved)
            result.labels.append(labels)
    except (TypeError, ValueError) as raised:
        error = raised
    raise_everywhere(error)

    # Facts about the rows of all processes.
    rows = list(chain.from_iterable(gather_batches(row_digests)))
    if not rows:
        raise ValueError(f"{name} has no samples: pass at least one batch")
    result.num_samples = len(rows)
    result.fingerprint = hashlib.sha256(b"".join(rows)).hexdigest()
    result.input_digests = list(chain.from_iterable(gather_batches(input_digests)))

    classes = set()
    for labels in result.labels:
        if labels is not None and not labels.is_floating_point():
            classes.update(labels.unique().tolist())
    by_process = gather(classes)
    result.classes = sorted(set().union(*by_process))
    return result


def _check_labels(labels: Tensor | None, rows: int, name: str, num_classes: int | None) -> None:
    """Raise if labels are missing, or are not class indices below `num_classes`.

    With None as `num_classes` labels of any kind pass.
    """
    if labels is None or len(labels) != rows:
        raise ValueError(
            f"{name} has no labels: give every batch what the metric compares with, or class indices, as 'labels', "
            f"one for each of its {rows} rows"
        )
    if num_classes is None:
        return
    if labels.is_floating_point() or labels.dim() != 1:
        raise ValueError(
            f"the labels of {name} are {labels.dtype} of shape {tuple(labels.shape)}: pass class indices, "
            f"one integer for each of the {rows} rows"
        )
    check_label_range(labels, name, num_classes)


def check_label_range(labels: Tensor, name: str, num_classes: int) -> None:
    """Raise if a label is not the index of a class."""
    outside = labels[(labels < 0) | (labels >= num_classes)]
    if len(outside):
        first = int(outside[0])
        raise ValueError(f"{name} has the label {first}: the model's classes are 0 to {num_classes - 1}")
