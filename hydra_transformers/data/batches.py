"""Batches of tensors from every form of data: loaders, lists of batches, and rows, which are padded and stacked."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from numbers import Number
from operator import length_hint
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import Dataset
from transformers import default_data_collator

from .._io.progress import with_progress_bar
from .labels import NO_TAG
from .rows import as_rows


LABEL_NAMES = ("labels", "label")
PER_TOKEN = ("input_ids", "attention_mask", "token_type_ids", "position_ids", "special_tokens_mask", "word_starts")
RAW_AUDIO = "input_values"  # samples, or a spectrogram
AUDIO_INPUTS = (RAW_AUDIO, "input_features")  # the second are Whisper's spectrograms, (mel bins, frames)
# A row has one label, text, image or audio; a batch has several.
DIMS_OF_A_ROW = {"labels": 0, "label": 0, "input_ids": 1, "pixel_values": 3, **dict.fromkeys(AUDIO_INPUTS, 2)}


class ChangedBatches:
    """Data whose batches pass through `change` each time they are read, after they are moved to their device."""

    def __init__(self, data: Any, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
        self.data, self.change = data, change

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return batches(self)


def batches(
    data: Any, batch_size: int = 32, device: torch.device | str | None = None, rank: int = 0, world_size: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Iterate over `data` as dict batches of tensors, each tensor with the rows in its first dimension.

    Args:
        data (`DataLoader`, `Dataset` or `list`): a torch `DataLoader`, a list (or any iterable) of dict batches, or a
            `torch` / `datasets` Dataset, pandas DataFrame or list of dict rows.
        batch_size (`int`, defaults to 32): rows per batch; used for rows only.
        device (`torch.device` or `str`, *optional*): where the tensors go; `None` leaves them where they are.
        rank (`int`, defaults to 0), world_size (`int`, defaults to 1): yield every `world_size`-th batch, from `rank` on.

    Arrays and lists of numbers become tensors; other entries (texts, file names) are dropped. Labels are called `labels` or
    `label`. Rows of tokens, as `dataset.map(tokenize)` makes them, are padded to the longest of their batch. For rows of raw
    images, texts or audio, see `load_data`.
    """
    if isinstance(data, ChangedBatches):
        yield from map(data.change, batches(data.data, batch_size, device, rank, world_size))
        return
    data = as_rows(data)
    check_is_data(data)
    if _holds_rows(data):
        dict_batches = map(collate, _row_groups(data, batch_size, rank, world_size))
    else:
        dict_batches = islice(data, rank, None, world_size)
    count = math.ceil(length_hint(data) / (batch_size if _holds_rows(data) else 1))  # 0 where it is unknown
    total = len(range(rank, count, world_size)) or None
    for number, batch in enumerate(with_progress_bar(dict_batches, total, "read", "batch")):
        _check_is_dict(batch, f"batch {number}")
        tensors = {name: _tensor(value) for name, value in batch.items() if _is_column(name, value)}
        if not tensors.keys() - set(LABEL_NAMES) or any(tensor.dim() == 0 for tensor in tensors.values()):
            raise TypeError(
                f"batch {number} of data is not a batch of model inputs (its entries: {_entries(batch)}): pass "
                "load_data(data, model), or batches of tensors whose first dimension counts the rows"
            )
        yield {name: tensor.to(device) if device is not None else tensor for name, tensor in tensors.items()}


def check_is_data(data: Any, name: str = "data") -> None:
    """Raises for what `batches` cannot read, without reading anything."""
    if isinstance(data, (Mapping, str, bytes, Tensor)) or not (_holds_rows(data) or isinstance(data, Iterable)):
        raise TypeError(
            f"{name} is a {type(data).__name__}: pass a DataLoader, a list of dict batches ([batch] for a single one) "
            "or a Dataset, DataFrame or list of dict rows"
        )


def _check_is_dict(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f'{name} of data is a {type(value).__name__}, not a dict such as {{"pixel_values": ...}}')


def _holds_rows(data: Any) -> bool:
    if isinstance(data, (list, tuple)):
        first = data[0] if data else None
        if not isinstance(first, Mapping) or _are_raw_audio(first):
            return False
        is_row = any(name in first and _dim(first[name]) == dim for name, dim in DIMS_OF_A_ROW.items())
        return is_row or _dim(first.get(RAW_AUDIO)) == 1
    return isinstance(data, Dataset) or any(cls.__module__.split(".")[0] == "datasets" for cls in type(data).__mro__)


def _are_raw_audio(batch: Mapping[str, Any]) -> bool:
    """Whether `input_values` with two axes are a batch of raw audio, and not one spectrogram: each row has a label or a mask."""
    if _dim(batch.get(RAW_AUDIO)) != 2:
        return False
    labels = next((batch[name] for name in LABEL_NAMES if name in batch), None)
    has_labels = (_dim(labels) or 0) > 0 and len(labels) == len(batch[RAW_AUDIO])
    return has_labels or _dim(batch.get("attention_mask")) == 2


def _row_groups(data: Any, batch_size: int, rank: int, world_size: int) -> Iterator[list[Any]]:
    """Groups of `batch_size` rows; a Dataset that can be indexed never loads the rows of other processes."""
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        for start in range(rank * batch_size, len(data), world_size * batch_size):
            yield [data[row] for row in range(start, min(start + batch_size, len(data)))]
        return
    rows = iter(data)
    yield from islice(iter(lambda: list(islice(rows, batch_size)), []), rank, None, world_size)


def collate(rows: list[Mapping[str, Any]], padding: int = 0) -> dict[str, Tensor]:
    """Rows as one batch of tensors. Shorter texts are filled up at the end with the token `padding`, which the attention mask
    leaves out; shorter raw audio with zeros, which its mask leaves out if it has one."""
    _check_is_dict(rows[0], "a row")
    names = {name: name for row in rows for name, value in row.items() if _dim(value) is not None}
    # Under these names Transformers' collator rounds all labels to whole numbers if the first is one.
    for name in ("label", "label_ids"):
        if names.pop(name, None) is not None:
            names.setdefault("labels", name)
    if not set(names) - set(LABEL_NAMES):
        raise TypeError(f"the rows of data are not model inputs ({_entries(rows[0])}): pass load_data(data, model)")
    partial = next((name for name in names.values() for row in rows if _dim(row.get(name)) is None), None)
    if partial is not None:
        raise ValueError(f"a row of data has no numbers as its {partial}, others have: give them to all rows or none")
    named = [{name: row[source] for name, source in names.items()} for row in rows]
    named = _padded(named, "input_ids", dict.fromkeys(PER_TOKEN, 0) | {"input_ids": padding})
    return default_data_collator(_padded(named, RAW_AUDIO, {RAW_AUDIO: 0, "attention_mask": 0}))


def _padded(rows: list[dict[str, Any]], key: str, fillers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Rows whose `key` is a sequence of numbers, at the length of the longest; other rows, and rows of one length, as they are.

    fillers: what the sequences of these names are filled up with, where they are as long as `key`
    """
    lengths = {len(row[key]) for row in rows if _dim(row.get(key)) == 1}
    if len(lengths) < 2:
        return rows
    if key == "input_ids":
        rows = [{"attention_mask": [1] * len(row[key])} | row for row in rows]
        are_tags = all(_dim(row.get("labels")) == 1 and len(row["labels"]) == len(row[key]) for row in rows)
        fillers = {**fillers, "labels": NO_TAG} if are_tags else fillers
    padded = []
    for row in rows:
        length = len(row[key])
        parts = {name: torch.as_tensor(row[name]) for name in fillers if name in row and len(row[name]) == length}
        missing = (0, max(lengths) - length)
        padded.append(row | {name: pad(part, missing, value=fillers[name]) for name, part in parts.items()})
    return padded


def _is_column(name: str, value: Any) -> bool:
    """Whether an entry of a batch holds numbers. A single number describes the batch, unless it is a label."""
    dim = _dim(value)
    return dim is not None and (dim > 0 or isinstance(value, Tensor) or name in LABEL_NAMES)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    first = value[0] if isinstance(value, (list, tuple)) else None
    if isinstance(first, Tensor):
        return torch.stack(tuple(value))
    return torch.tensor(np.stack(value) if isinstance(first, np.ndarray) else value)


def _entries(batch: Mapping[str, Any]) -> str:
    """The names in a batch or row with their types: "image (PngImageFile), label (int)"."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in batch.items()) or "none"


def _dim(value: Any) -> int | None:
    """The dimensions of numbers in a tensor, an array or nested lists, 0 of a number; None for anything else."""
    if isinstance(value, (list, tuple)):
        inner = _dim(value[0]) if value else None
        return None if inner is None else inner + 1
    if isinstance(value, np.ndarray):
        return value.ndim if value.dtype.kind in "biuf" else None
    if isinstance(value, Tensor):
        return value.ndim
    return 0 if isinstance(value, Number) else None


def split_labels(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """A batch as the model's inputs and the labels (`None` without any)."""
    inputs = {name: value for name, value in batch.items() if name not in LABEL_NAMES}
    labels = next((batch[name] for name in LABEL_NAMES if batch.get(name) is not None), None)
    return inputs, labels


def labels_of(batch: Mapping[str, Tensor], rows: int) -> Tensor | None:
    """A batch's labels, one for each of its rows; None without any."""
    labels = split_labels(batch)[1]
    if labels is not None and len(labels) != rows:
        raise ValueError(f"a batch of data has {rows} rows and {len(labels)} labels: give each row one")
    return labels
