"""Batches of tensors from every form of data: loaders, lists of batches, and rows, which are padded and stacked."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import default_data_collator

from .labels import match_names


LABEL_NAMES = ("labels", "label")
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask")


class ChangedBatches:
    """Data whose batches go through `change` each time they are read, once they are on their device."""

    def __init__(self, data: Any, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
        self.data, self.change = data, change

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return batches(self)


def batches(
    data: Any,
    batch_size: int = 32,
    device: torch.device | str | None = None,
    rank: int = 0,
    world_size: int = 1,
    classes: Sequence[str] | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Iterate over `data` as dict batches of tensors, each tensor with the rows in its first dimension.

    Args:
        data: a torch `DataLoader`, a list (or any iterable) of dict batches, or a `torch` / `datasets` Dataset or list of dict
            rows.
        batch_size: rows per batch; used for rows only, the others bring their own batches.
        device: where the tensors go; `None` leaves them where they are.
        rank, world_size: yield every `world_size`-th batch, starting with batch `rank`, so that processes share the work.
        classes: of the model, where labels are needed: labels that are names become their indices.

    Arrays and lists of numbers become tensors; entries that are no numbers (texts, file names) are dropped. Labels are
    called `labels` or `label`. Rows of tokens, as `dataset.map(tokenize)` makes them, are filled up to the longest of their
    batch. For rows of images, texts or sounds as they are, see `load_data`.
    """
    if isinstance(data, ChangedBatches):
        yield from map(data.change, batches(data.data, batch_size, device, rank, world_size, classes))
        return
    for number, batch in enumerate(_raw_batches(data, batch_size, rank, world_size, classes)):
        if not isinstance(batch, Mapping):
            raise TypeError(
                f"batch {number} of data is a {type(batch).__name__}: each batch must be a dict of tensors "
                'such as {"pixel_values": ..., "labels": ...}'
            )
        batch = _with_class_indices(batch, classes)
        tensors = {name: _tensor(name, value, number) for name, value in batch.items() if _counts(name, value)}
        if not tensors.keys() - set(LABEL_NAMES):
            raise TypeError(
                f"batch {number} of data has no tensors{' but the labels' if tensors else ''} (its entries: "
                f"{_entries(batch)}): tokenize the texts or run the images through the model's image processor first"
            )
        if any(tensor.dim() == 0 for tensor in tensors.values()):
            raise TypeError(
                f"batch {number} of data holds single values, so it is a row: pass a Dataset of rows, "
                "or batches whose first dimension counts the rows"
            )
        yield {name: tensor.to(device) if device is not None else tensor for name, tensor in tensors.items()}


def _with_class_indices(batch: Mapping[str, Any], classes: Sequence[str] | None) -> Mapping[str, Any]:
    """A row or a batch whose labels, where they are names, are the indices of these classes."""
    name = next((name for name in LABEL_NAMES if name in batch), None)
    if classes is None or name is None:
        return batch
    is_row = isinstance(batch[name], str)
    labels = [batch[name]] if is_row else batch[name]
    if not isinstance(labels, Sequence) or not len(labels) or not isinstance(labels[0], str):
        return batch
    names = sorted(set(labels))
    found = match_names(names, list(classes), set(range(len(names))), "data")
    indices = [found[names.index(label)] for label in labels]
    return {**batch, name: indices[0] if is_row else indices}


def _counts(name: str, value: Any) -> bool:
    """Whether an entry of a batch is numbers. A single number beside the batch is none of its rows, unless it is a label."""
    dim = _dim(value)
    return dim is not None and (dim > 0 or isinstance(value, Tensor) or name in LABEL_NAMES)


def _tensor(name: str, value: Any, number: int) -> Tensor:
    if isinstance(value, Tensor):
        return value
    first = value[0] if isinstance(value, (list, tuple)) else None
    try:
        if isinstance(first, Tensor):
            return torch.stack(tuple(value))
        return torch.tensor(np.stack(value) if isinstance(first, np.ndarray) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"{name} in batch {number} of data is a {type(value).__name__} that makes no tensor ({error}): pad its rows to "
            "one length"
        ) from error


def _entries(batch: Mapping[str, Any]) -> str:
    """The names in a batch or row, with the kind of what is no tensor: "image (PngImageFile), label"."""
    return (
        ", ".join(
            f"{name}" if isinstance(value, (Tensor, Number)) else f"{name} ({type(value).__name__})"
            for name, value in batch.items()
        )
        or "none"
    )


def check_is_data(data: Any, name: str = "data") -> None:
    """Refuses what `batches` cannot read, without reading anything."""
    if isinstance(data, (Mapping, str, bytes, Tensor)) or not (_holds_rows(data) or isinstance(data, Iterable)):
        raise TypeError(
            f"{name} is a {type(data).__name__}: pass a DataLoader, a list of dict batches ([batch] for a single one) "
            "or a Dataset or list of dict rows"
        )


def _raw_batches(
    data: Any, batch_size: int, rank: int, world_size: int, classes: Sequence[str] | None
) -> Iterator[Any]:
    check_is_data(data)
    if not _holds_rows(data):
        yield from islice(data, rank, None, world_size)
        return
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}: pass at least 1")
    for number, rows in enumerate(_row_groups(data, batch_size, rank, world_size)):
        if not isinstance(rows[0], Mapping):
            raise TypeError(
                f"a row of data (in batch {number}) is a {type(rows[0]).__name__}: each row must be a dict "
                'such as {"pixel_values": ..., "labels": ...}'
            )
        yield collate(rows, classes=classes)


def collate(
    rows: list[Mapping[str, Any]], padding: int = 0, classes: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Rows as one batch of tensors. Tokens of texts of different lengths are filled up at the end, with the token `padding`
    that the attention mask leaves out; labels that are names of `classes` become their indices."""
    rows = [_with_class_indices(row, classes) for row in rows]
    names = {name: name for row in rows for name, value in row.items() if _dim(value) is not None}
    # Under these names Transformers' collator makes whole numbers of all labels where the first is one.
    for name in ("label", "label_ids"):
        if names.pop(name, None) is not None:
            names.setdefault("labels", name)
    if not set(names) - set(LABEL_NAMES):
        raise TypeError(
            f"the rows of data have no numbers{' but the labels' if names else ''} (their entries: {_entries(rows[0])}): "
            "pass load_data(data, model)"
        )
    for row in rows:
        for name in names.values():
            if _dim(row.get(name)) is None:
                raise ValueError(
                    f"a row of data has no numbers as its {name}, others of its batch have: give them to every row, or to none"
                )
    try:
        return default_data_collator(
            _filled_up([{name: row[source] for name, source in names.items()} for row in rows], padding)
        )
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"the rows of data cannot be stacked ({error}): pad them to one length, or pass a DataLoader that does"
        ) from error


def _filled_up(rows: list[dict[str, Any]], padding: int) -> list[dict[str, Any]]:
    """Rows of tokens at the length of the longest; those that are no texts, or of one length, as they are."""
    lengths = {len(row["input_ids"]) for row in rows if _dim(row.get("input_ids")) == 1}
    if len(lengths) < 2:
        return rows
    filled = []
    for row in rows:
        length = len(row["input_ids"])
        row = {"attention_mask": [1] * length} | row
        tokens = {name: value for name, value in row.items() if name in PER_TOKEN and len(value) == length}
        fillers = dict.fromkeys(tokens, 0) | {"input_ids": padding}
        missing = max(lengths) - length
        filled.append(row | {name: [*map(int, value), *[fillers[name]] * missing] for name, value in tokens.items()})
    return filled


def _row_groups(data: Any, batch_size: int, rank: int, world_size: int) -> Iterator[list[Any]]:
    """Groups of `batch_size` rows; a Dataset that can be indexed never loads the rows of other processes."""
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        for start in range(rank * batch_size, len(data), world_size * batch_size):
            yield [data[row] for row in range(start, min(start + batch_size, len(data)))]
        return
    rows, number = iter(data), 0
    while group := list(islice(rows, batch_size)):
        if number % world_size == rank:
            yield group
        number += 1


def _holds_rows(data: Any) -> bool:
    from_datasets = any(cls.__module__.split(".")[0] == "datasets" for cls in type(data).__mro__)
    return isinstance(data, Dataset) or from_datasets or (isinstance(data, (list, tuple)) and _begins_with_a_row(data))


def _begins_with_a_row(entries: Sequence[Any]) -> bool:
    """A row has one label, one text, one image or one sound; a batch has several."""
    first = entries[0] if entries else None
    if not isinstance(first, Mapping):
        return False
    dims = {"labels": 0, "label": 0, "input_ids": 1, "pixel_values": 3, "input_values": 2}
    return any(name in first and _dim(first[name]) == dim for name, dim in dims.items())


def _dim(value: Any) -> int | None:
    """Of numbers in a tensor, an array, nested lists or by themselves; None for anything else."""
    if isinstance(value, (list, tuple)):
        inner = _dim(value[0]) if value else None
        return None if inner is None else inner + 1
    if isinstance(value, np.ndarray):
        return value.ndim if value.dtype.kind in "biuf" else None
    if isinstance(value, Tensor):
        return value.ndim
    return 0 if isinstance(value, Number) else None


def split_labels(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Part a batch into the model's inputs and the labels (`None` where there are none)."""
    inputs = {name: value for name, value in batch.items() if name not in LABEL_NAMES}
    labels = next((batch[name] for name in LABEL_NAMES if batch.get(name) is not None), None)
    return inputs, labels


def labels_of(batch: Mapping[str, Tensor], rows: int) -> Tensor | None:
    """A batch's labels, one for each of its rows; None where it has none."""
    labels = split_labels(batch)[1]
    if labels is not None and len(labels) != rows:
        raise ValueError(f"a batch of data has {rows} rows and {len(labels)} labels: give each row one")
    return labels
