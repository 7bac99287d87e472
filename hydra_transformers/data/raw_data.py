"""Data sets as they come, with images, texts or sounds in their columns, as rows that a model reads."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, SequenceFeatureExtractor

from ..models.pipeline_hydra import read_image
from .prediction import LABEL_NAMES
from .sounds import is_sound, prepared_sound, undecoded


# The usual names of a column of texts, first choice first.
TEXT_NAMES = ("text", "sentence", "content", "review", "question")


class PreparedRows(torch.utils.data.Dataset):
    """Rows `{"pixel_values": ...}`, `{"input_ids": ..., "attention_mask": ...}` or `{"input_values": ...}`, with `labels` where
    the data has any; made when they are read. `prepare` makes one."""

    def __init__(self, rows: Any, processor: Any, columns: tuple[str, ...], label: str | None, max_length: int | None):
        self.rows, self.processor, self.columns = rows, processor, columns
        self.label, self.max_length = label, max_length

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        values = [row[column] for column in self.columns]
        if self.holds_texts:
            for column, value in zip(self.columns, values, strict=True):
                if not isinstance(value, str):
                    raise ValueError(
                        f"row {index} of the data has a {type(value).__name__} as its {column}: pass texts"
                    )
            length = {} if self.max_length is None else {"max_length": self.max_length}
            prepared = dict(self.processor(*values, truncation=True, **length))
        elif isinstance(self.processor, SequenceFeatureExtractor):
            prepared = self._sound(values[0], index)
        else:
            prepared = {"pixel_values": self._pixels(values[0], index)}
        return prepared if self.label is None else prepared | {"labels": self._label(row[self.label], index)}

    @property
    def holds_texts(self) -> bool:
        return isinstance(self.processor, PreTrainedTokenizerBase)

    def with_changed_texts(self, change: Callable[[str], str]) -> "PreparedRows":
        """The same rows, their texts changed before they are tokenized."""
        rows = _ChangedTexts(self.rows, self.columns, change)
        return PreparedRows(rows, self.processor, self.columns, self.label, self.max_length)

    def _pixels(self, image: Any, index: int) -> Tensor:
        if hasattr(image, "mode"):
            mean = getattr(self.processor, "image_mean", None)
            is_grey = isinstance(mean, (list, tuple)) and len(mean) == 1
            image = read_image(image, f"the image of row {index}", "L" if is_grey else "RGB")
        try:
            return self.processor(images=image, return_tensors="pt")["pixel_values"][0]
        except (TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"row {index} of the data cannot be made pixel_values ({error}): pass images in {self.columns[0]!r}, or "
                "name their column as image="
            ) from error

    def _sound(self, sound: Any, index: int) -> dict[str, Tensor]:
        try:
            return prepared_sound(sound, self.processor)
        except (TypeError, ValueError, OSError) as error:
            raise ValueError(
                f"row {index} of the data cannot be read as a sound ({error}): pass sounds in {self.columns[0]!r}, or name their "
                "column as audio="
            ) from error

    def _label(self, label: Any, index: int) -> Any:
        if isinstance(label, str):
            raise ValueError(
                f"the label of row {index} is {label!r}: pass class indices, as the model's config.label2id has them"
            )
        return label


class _ChangedTexts:
    """Rows whose texts are changed when they are read."""

    def __init__(self, rows: Any, columns: tuple[str, ...], change: Callable[[str], str]):
        self.rows, self.columns, self.change = rows, columns, change

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        return {**row, **{column: self.change(row[column]) for column in self.columns}}


def prepare(
    data: Any,
    processor: Any,
    *,
    image: str | None = None,
    text: str | Sequence[str] | None = None,
    audio: str | None = None,
    label: str | None = None,
    max_length: int | None = None,
) -> PreparedRows:
    """A data set of images, texts or sounds as everything here takes it: circuits, fine-tuning, calibration, reports.

    Args:
        data: a `datasets` or `torch` Dataset, or a list, of dict rows.
        processor: the model's image processor, tokenizer or feature extractor.
        image: the column of images; by default the first that holds any.
        text: the column of texts, or two columns of pairs; by default the usual name, or the only column of texts.
        audio: the column of sounds; by default the only one. They have to be sampled as the feature extractor asks; files
            other than plain WAV take ffmpeg.
        label: the column of class indices; by default `labels` or `label` where there is one.
        max_length: tokens of a text; by default what the tokenizer is made for.

    Images, texts and sounds are prepared when a row is read, and texts of a batch are filled up to the longest of them.

        >>> data = prepare(load_dataset("glue", "mrpc", split="validation"), tokenizer, text=("sentence1", "sentence2"))
    """
    if not callable(processor):
        raise TypeError(
            f"processor is a {type(processor).__name__}: pass the model's tokenizer, image processor or feature extractor"
        )
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__") or isinstance(data, (Mapping, str)):
        raise TypeError(f"data is a {type(data).__name__}: pass a Dataset or a list of dict rows")
    if len(data) == 0:
        raise ValueError("data has no rows: pass at least one")
    data = undecoded(data)
    row = data[0]
    if not isinstance(row, Mapping):
        raise TypeError(f"a row of data is a {type(row).__name__}: each row must be a dict of columns")
    columns = _columns(row, processor, {"image": image, "text": text, "audio": audio})
    label = label or next((name for name in LABEL_NAMES if name in row), None)
    for name in (*columns, *(() if label is None else (label,))):
        if name not in row:
            raise ValueError(f"data has no column {name!r}: it has {', '.join(map(repr, row))}")
    return PreparedRows(data, processor, columns, label, max_length)


def _columns(row: Mapping[str, Any], processor: Any, named: Mapping[str, Any]) -> tuple[str, ...]:
    """The columns that a processor reads.

    named: those that the caller named, by kind
    """
    if isinstance(processor, PreTrainedTokenizerBase):
        kind, reads = "text", "a tokenizer reads texts"
    elif isinstance(processor, SequenceFeatureExtractor):
        kind, reads = "audio", "a feature extractor reads sounds"
    else:
        kind, reads = "image", "an image processor reads images"
    other = next((column for name, column in named.items() if name != kind and column is not None), None)
    if other is not None:
        raise ValueError(f"the column {other!r} does not go with a {type(processor).__name__}: {reads}: pass {kind}=")
    if kind == "text":
        return _text_columns(row, named["text"])
    return (named[kind] or (_audio_column(row) if kind == "audio" else _image_column(row)),)


def _text_columns(row: Mapping[str, Any], text: str | Sequence[str] | None) -> tuple[str, ...]:
    if text is not None:
        columns = (text,) if isinstance(text, str) else tuple(text)
        if not 1 <= len(columns) <= 2:
            raise ValueError(f"text is {text!r}: pass one column, or two of pairs")
        return columns
    found = [name for name, value in row.items() if isinstance(value, str)]
    usual = [name for name in TEXT_NAMES if name in found]
    if usual or len(found) == 1:
        return ((usual or found)[0],)
    raise ValueError(_which("texts", found, row, "text"))


def _image_column(row: Mapping[str, Any]) -> str:
    found = [name for name, value in row.items() if hasattr(value, "convert") and hasattr(value, "size")]
    if len(found) == 1:
        return found[0]
    raise ValueError(_which("images", found, row, "image"))


def _audio_column(row: Mapping[str, Any]) -> str:
    found = [name for name, value in row.items() if is_sound(value)]
    if len(found) == 1:
        return found[0]
    raise ValueError(_which("sounds", found, row, "audio"))


def _which(kind: str, found: Sequence[str], row: Mapping[str, Any], option: str) -> str:
    if found:
        return f"data has {kind} in {', '.join(map(repr, found))}: name the column as {option}="
    return f"data has no column of {kind}, it has {', '.join(map(repr, row))}: name the column as {option}="
