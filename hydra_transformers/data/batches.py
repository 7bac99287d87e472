"""Batches of tensors from every form of data: loaders, lists of batches, and padded rows."""

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
    """Data whose batches pass through `change` each time they are read, on their device."""

    def __init__(self, data: Any, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]):
        self.data = data
        self.change = change

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return batches(self)


def batches(
    data: Any, batch_size: int = 32, device: torch.device | str | None = None, rank: int = 0, world_size: int = 1
) -> Iterator[dict[str, Tensor]]:
    """Iterate over `data` as dict batches of tensors, whose first dimension counts the rows.

    Args:
        data (`DataLoader`, `Dataset` or `list`): a torch `DataLoader`, a list (or any iterable) of
            dict batches, or a `torch` / `datasets` Dataset, pandas DataFrame or list of dict rows.
        batch_size (`int`, defaults to 32): rows per batch; used for rows only.
        device (`torch.device` or `str`, *optional*): where the tensors go; `None` leaves them where
            they are.
        rank (`int`, defaults to 0), world_size (`int`, defaults to 1): yield every `world_size`-th
            batch, from `rank` on.

    Arrays and lists of numbers become tensors; other entries (texts, file names) are dropped.
    Labels are called `labels` or `label`. Rows of tokens, as `dataset.map(tokenize)` makes them,
    are padded to the longest of their batch. For rows of raw images, texts or audio, see
    `load_data`.
    """
    if isinstance(data, ChangedBatches):
        yield from map(data.change, batches(data.data, batch_size, device, rank, world_size))
        return
    data = as_rows(data)
    check_is_data(data)

    # The batches of this process, and how many all have
    if _holds_rows(data):
        dict_batches = map(collate, _row_groups(data, batch_size, rank, world_size))
        count = math.ceil(length_hint(data) / batch_size)
    else:
        dict_batches = islice(data, rank, None, world_size)
        count = length_hint(data)  # 0 where it is unknown
    total = len(range(rank, count, world_size)) or None

    # Their numbers as tensors; texts and file names are dropped
    for number, batch in enumerate(with_progress_bar(dict_batches, total, "read", "batch")):
        _check_is_dict(batch, f"batch {number}")
        tensors = {name: _tensor(value) for name, value in batch.items() if _is_column(name, value)}
        has_inputs = bool(tensors.keys() - set(LABEL_NAMES))
        if not has_inputs or any(tensor.dim() == 0 for tensor in tensors.values()):
            raise TypeError(
                f"batch {number} of data is not a batch of model inputs (its entries: {_entries(batch)}): pass "
                "load_data(data, model), or batches of tensors whose first dimension counts the rows"
            )
        if device is not None:
            tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
        yield tensors


def check_is_data(data: Any, name: str = "data") -> None:
    """Raise for what `batches` cannot read, without reading anything."""
    is_one_entry = isinstance(data, (Mapping, str, bytes, Tensor))
    if is_one_entry or not (_holds_rows(data) or isinstance(data, Iterable)):
        raise TypeError(
            f"{name} is a {type(data).__name__}: pass a DataLoader, a list of dict batches ([batch] for a single one) "
            "or a Dataset, DataFrame or list of dict rows"
        )


def _check_is_dict(value: Any, name: str) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f'{name} of data is a {type(value).__name__}, not a dict such as {{"pixel_values": ...}}')


def _holds_rows(data: Any) -> bool:
    """Whether data holds rows, and not batches."""
    if isinstance(data, (list, tuple)):
        return bool(data) and _is_row(data[0])
    if isinstance(data, Dataset):
        return True
    return any(cls.__module__.split(".")[0] == "datasets" for cls in type(data).__mro__)


def _is_row(entry: Any) -> bool:
    """Whether an entry of a list is a row, by the dimensions of what it holds."""
    if not isinstance(entry, Mapping) or _are_raw_audio(entry):
        return False
    if _dim(entry.get(RAW_AUDIO)) == 1:
        return True
    return any(name in entry and _dim(entry[name]) == dim for name, dim in DIMS_OF_A_ROW.items())


def _are_raw_audio(batch: Mapping[str, Any]) -> bool:
    """Whether `input_values` with two axes are a batch of raw audio, and not one spectrogram: each
    row has a label or a mask."""
    if _dim(batch.get(RAW_AUDIO)) != 2:
        return False
    if _dim(batch.get("attention_mask")) == 2:
        return True
    for name in LABEL_NAMES:
        if name in batch:
            labels = batch[name]
            return (_dim(labels) or 0) > 0 and len(labels) == len(batch[RAW_AUDIO])
    return False


def _row_groups(data: Any, batch_size: int, rank: int, world_size: int) -> Iterator[list[Any]]:
    """Yield groups of `batch_size` rows.

    A Dataset that can be indexed never loads the rows of other processes.
    """
    if hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        for start in range(rank * batch_size, len(data), world_size * batch_size):
            end = min(start + batch_size, len(data))
            yield [data[row] for row in range(start, end)]
        return
    rows = iter(data)
    groups = iter(lambda: list(islice(rows, batch_size)), [])
    yield from islice(groups, rank, None, world_size)


def collate(rows: list[Mapping[str, Any]], padding: int = 0) -> dict[str, Tensor]:
    """Return rows as one batch of tensors.

    Shorter texts are filled up at the end with the token `padding`, which the attention mask leaves
    out; shorter raw audio with zeros, which its mask leaves out if it has one.
    """
    sources = _columns_of(rows)
    named = [{name: row[source] for name, source in sources.items()} for row in rows]
    padded = _padded_tokens(named, padding)
    padded = _padded(padded, RAW_AUDIO, {RAW_AUDIO: 0, "attention_mask": 0})
    return default_data_collator(padded)


def _columns_of(rows: list[Mapping[str, Any]]) -> dict[str, str]:
    """Return the names of a batch's entries, with their names in the rows; raise where a row lacks
    one, or there are no inputs."""
    _check_is_dict(rows[0], "a row")
    names = {name: name for row in rows for name, value in row.items() if _dim(value) is not None}
    # Under these names Transformers' collator rounds all labels if the first is a whole number.
    for name in ("label", "label_ids"):
        if names.pop(name, None) is not None:
            names.setdefault("labels", name)
    if not set(names) - set(LABEL_NAMES):
        raise TypeError(f"the rows of data are not model inputs ({_entries(rows[0])}): pass load_data(data, model)")
    for name in names.values():
        if any(_dim(row.get(name)) is None for row in rows):
            raise ValueError(f"a row of data has no numbers as its {name}, others have: give them to all rows or none")
    return names


def _padded_tokens(rows: list[dict[str, Any]], padding: int) -> list[dict[str, Any]]:
    """Return rows of tokens of different lengths at that of the longest, with an attention mask."""
    lengths = _lengths_of(rows, "input_ids")
    if len(lengths) < 2:
        return rows
    # Without a mask the model would read what is filled up.
    rows = [{"attention_mask": [1] * len(row["input_ids"])} | row for row in rows]
    fillers = dict.fromkeys(PER_TOKEN, 0) | {"input_ids": padding}
    if all(_has_tags(row) for row in rows):
        fillers["labels"] = NO_TAG
    return _padded(rows, "input_ids", fillers)


def _has_tags(row: Mapping[str, Any]) -> bool:
    """Whether a row of tokens has a label for each of them."""
    labels = row.get("labels")
    return _dim(labels) == 1 and len(labels) == len(row["input_ids"])


def _lengths_of(rows: list[dict[str, Any]], key: str) -> set[int]:
    """Return the lengths that occur where the entry `key` is a sequence of numbers."""
    return {len(row[key]) for row in rows if _dim(row.get(key)) == 1}


def _padded(rows: list[dict[str, Any]], key: str, fillers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return rows whose `key` is a sequence of numbers at the length of the longest.

    Other rows, and rows of one length, stay as they are.

    fillers: what the sequences of these names are filled up with, where they are as long as `key`
    """
    lengths = _lengths_of(rows, key)
    if len(lengths) < 2:
        return rows
    padded = []
    for row in rows:
        length = len(row[key])
        missing = (0, max(lengths) - length)
        filled = {}
        for name, filler in fillers.items():
            if name in row and len(row[name]) == length:
                filled[name] = pad(torch.as_tensor(row[name]), missing, value=filler)
        padded.append(row | filled)
    return padded


def _is_column(name: str, value: Any) -> bool:
    """Whether an entry of a batch holds numbers of its rows.

    A single number describes the batch, unless it is a label.
    """
    dim = _dim(value)
    return dim is not None and (dim > 0 or isinstance(value, Tensor) or name in LABEL_NAMES)


def _tensor(value: Any) -> Tensor:
    if isinstance(value, Tensor):
        return value
    if isinstance(value, (list, tuple)):
        if isinstance(value[0], Tensor):
            return torch.stack(tuple(value))
        if isinstance(value[0], np.ndarray):
            return torch.tensor(np.stack(value))
    return torch.tensor(value)


def _entries(batch: Mapping[str, Any]) -> str:
    """Return the names in a batch or row with their types: "image (PngImageFile), label (int)"."""
    return ", ".join(f"{name} ({type(value).__name__})" for name, value in batch.items()) or "none"


def _dim(value: Any) -> int | None:
    """Return how many dimensions the numbers of a tensor, an array or nested lists have.

    A number has 0; anything else None.
    """
    if isinstance(value, Tensor):
        return value.ndim
    if isinstance(value, np.ndarray):
        are_numbers = value.dtype.kind in "biuf"
        return value.ndim if are_numbers else None
    if isinstance(value, (list, tuple)):
        inner = _dim(value[0]) if value else None
        return None if inner is None else inner + 1
    return 0 if isinstance(value, Number) else None


def split_labels(batch: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor | None]:
    """Return a batch as the model's inputs and the labels (`None` without any)."""
    inputs = {name: value for name, value in batch.items() if name not in LABEL_NAMES}
    for name in LABEL_NAMES:
        if batch.get(name) is not None:
            return inputs, batch[name]
    return inputs, None


def labels_of(batch: Mapping[str, Tensor], rows: int) -> Tensor | None:
    """Return a batch's labels, one for each of its rows; None without any."""
    _, labels = split_labels(batch)
    if labels is not None and len(labels) != rows:
        raise ValueError(f"a batch of data has {rows} rows and {len(labels)} labels: give each row one")
    return labels
