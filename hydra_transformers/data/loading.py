"""`load_data`: a user's data set, whatever it is, as rows that a model reads."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_MAPPING,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    SequenceFeatureExtractor,
)

from ..fusion.structure import without_weights
from ..models import auto
from ..models.auto import HEADS
from ..models.pipeline_hydra import image_mode, most_tokens, read_image
from .columns import (
    PLURALS,
    check_none_is_missing,
    column_kinds,
    find_columns,
    find_label_column,
    without_missing_columns,
)
from .labels import (
    check_classes,
    class_indices,
    class_names_of,
    label_values,
    match_labels,
    match_names,
    model_classes,
)
from .prediction import config_of
from .processors import load_processor
from .rows import FEW_ROWS, DataSource, load_rows
from .sounds import prepared_sound, undecoded


@dataclass
class PreparedData(torch.utils.data.Dataset):
    """Rows `{"pixel_values": ...}`, `{"input_ids": ..., ...}` or `{"input_values": ...}`, with `labels` where the data has any;
    made when they are read. `load_data` makes one.

    rows: the data set as it came
    kind: "image", "text" or "audio"
    columns: the one that is read, or two of pairs
    label: the column of labels; None for data without
    labels: of all rows, as the model's class indices; None where they are read row by row
    class_names: of the data's own classes, in order; None where they have no names
    split: the one that was read; None where the data has none
    notes: sentences on what was found and decided
    max_length: tokens that a text, or both texts of a pair together, are cut to; None where nothing says
    change: a function that an image, or each text, goes through before it is processed
    """

    rows: Any
    processor: Any
    kind: str
    columns: tuple[str, ...]
    label: str | None = None
    labels: list[Any] | None = None
    class_names: list[str] | None = None
    split: str | None = None
    notes: list[str] = field(default_factory=list)
    max_length: int | None = None
    image_mode: str = "RGB"
    model_classes: list[str] | None = None
    change: Callable[[Any], Any] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = self.rows[index]
        values = [row[column] for column in self.columns]
        if self.kind == "text":
            prepared = self._tokens(values, index)
        else:
            prepared = (self._sound if self.kind == "audio" else self._pixels)(values[0], index)
        if self.labels is not None:
            return {**prepared, "labels": self.labels[index]}
        return prepared if self.label is None else {**prepared, "labels": self._label(row[self.label], index)}

    def _tokens(self, texts: list[Any], index: int) -> dict[str, list[int]]:
        for column, text in zip(self.columns, texts, strict=True):
            if not isinstance(text, str):
                raise ValueError(f"row {index} of the data has a {type(text).__name__} as its {column}: pass texts")
        texts = texts if self.change is None else [self.change(text) for text in texts]
        length = {} if self.max_length is None else {"max_length": self.max_length}
        return dict(self.processor(*texts, truncation=True, **length))

    def _pixels(self, image: Any, index: int) -> dict[str, Tensor]:
        if hasattr(image, "mode"):
            image = read_image(image, f"the image of row {index}", self.image_mode)
        image = image if self.change is None else self.change(image)
        try:
            return {"pixel_values": self.processor(images=image, return_tensors="pt")["pixel_values"][0]}
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
                f"row {index} of the data cannot be read as a sound ({error}): pass sounds in {self.columns[0]!r}, or name "
                "their column as audio="
            ) from error

    def _label(self, label: Any, index: int) -> Any:
        if not isinstance(label, str):
            return label
        if self.model_classes is None:
            raise ValueError(
                f"the label of row {index} is {label!r}: pass the model in place of its processor, whose class names are the "
                "labels, or class indices"
            )
        return match_names([label], self.model_classes, {0}, "data")[0]


def load_data(
    data: Any,
    model: Any,
    *,
    split: str | Sequence[str] | None = None,
    part: str | None = None,
    limit: int | None = None,
    image: str | None = None,
    text: str | Sequence[str] | None = None,
    audio: str | None = None,
    label: str | None = None,
    labelled: bool | None = None,
    labels_in_order: bool = False,
    max_length: int | None = None,
    processor: Any = None,
) -> PreparedData:
    """A data set of images, texts or sounds as everything here takes it: fine-tuning, circuits, calibration, reports.

    Args:
        data: the name of a data set on the Hub ("cifar100", with a config "glue:sst2"); a folder of images or sounds, of csv,
            json or parquet files, or that `save_to_disk` wrote; one such file; or a `datasets` or `torch` Dataset, a
            DatasetDict, or a list, of dict rows.
        model: the model that reads it, or its folder, Hub name or config: it says what is read, and its class names are
            matched with those of the data. Or its tokenizer, image processor or feature extractor alone: labels are then
            taken as they are.
        split: such as "train", "train[:1000]", "train[:10%]"; of several names the first that exists; by default of
            validation, test and train.
        part: "training", "validation" or "test": the split of that purpose where there is one with labels, else a random
            tenth that is cut out of the first split, the same each time, before any limit.
        limit: at most this many rows, drawn at random with the seed 0, because many sets are sorted by class.
        image, audio, text, label: columns, found where they are not named. "translation.en" is a field of a text column;
            ("premise", "hypothesis") or "premise,hypothesis" are two columns of pairs.
        labelled: True refuses data without labels; False leaves them out, for data from elsewhere, which may also call its
            columns otherwise. By default there are labels where the data has any.
        labels_in_order: take the data's class indices as they are, whatever the classes are called.
        max_length: the tokens that texts, or both texts of a pair together, are cut to; by default those that the
            tokenizer says, or fewer where the model reads fewer.
        processor: the tokenizer, image processor, feature extractor or two in one; by default the one saved with the model.

    Images, texts and sounds are processed when a row is read, and texts of a batch are filled up to the longest of them.

        >>> data = load_data("glue:mrpc", model, split="validation", text=("sentence1", "sentence2"))
    """
    if isinstance(data, PreparedData):
        return data
    source = DataSource(data, split, part, limit, image, audio, text, label, labels_in_order, max_length)
    config, processor = _config_and_processor(model, processor)
    _check_is_a_data_set(data)
    rows, split, note = load_rows(source)
    rows = undecoded(rows)
    if labelled is False:
        source = without_missing_columns(source, rows)
    kind = _kind_read_by(processor)
    columns = find_columns(rows, kind, source)
    for column in columns:
        check_none_is_missing(rows, column, kind, source)
    if kind == "image" and hasattr(rows, "features") and not getattr(rows.features[columns[0]], "decode", True):
        rows = rows.cast_column(columns[0], type(rows.features[columns[0]])())
    found = PreparedData(rows, processor, kind, columns, split=split, notes=[note])
    if part in ("validation", "test") and len(rows) < FEW_ROWS:
        found.notes.append(f"only {len(rows)} rows judge: differences of a few points between models may be chance")
    if labelled is not False:
        _add_labels(found, source, config, is_required=bool(labelled))
    found.image_mode = image_mode(config) if config is not None else _mode_of(processor)
    named = (
        f"column {columns[0]!r}" if len(columns) == 1 else f"pairs of the columns {columns[0]!r} and {columns[1]!r}"
    )
    if kind == "text":
        found.max_length = _max_length(config, processor, max_length)
        named += "" if found.max_length is None else f", at most {found.max_length} tokens"
    found.notes.append(f"{PLURALS[kind]}: {named}")
    return found


def check_has_variety(data: PreparedData, name: str, purpose: str, by_classes: bool = True) -> None:
    """Refuses a single row, and with `by_classes` rows of one class. purpose: such as "to learn" """
    if len(data) < 2:
        raise ValueError(f"{name} gives 1 row, too few {purpose}: read more of it")
    if by_classes and len(set(data.labels)) < 2:
        raise ValueError(
            f"all {len(data):,} rows of {name} have the same label, so there is nothing {purpose}: where the rows are "
            "sorted by class, read all of them, or draw some with limit= (--limit)"
        )


def load_if_named(data: Any, model: Any, **settings: Any) -> Any:
    """Loads a data set that is given by its Hub name, folder or file, or several of them in a dict; other data is left alone."""
    if isinstance(data, Mapping):
        return {name: load_if_named(each, model, **settings) for name, each in data.items()}
    return load_data(data, model, **settings) if isinstance(data, (str, os.PathLike)) else data


def _check_is_a_data_set(data: Any) -> None:
    if isinstance(data, (str, os.PathLike)):
        return
    if isinstance(data, Mapping):
        if not data or not all(hasattr(rows, "features") for rows in data.values()):
            raise TypeError(f"data is a {type(data).__name__}: pass a Dataset or a list of dict rows")
        return
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise TypeError(
            f"data is a {type(data).__name__}: pass the name of a data set, a folder or file, a Dataset or a list of dict rows"
        )
    if len(data) == 0:
        raise ValueError("data has no rows: pass at least one")


# The model's side


def _config_and_processor(model: Any, processor: Any) -> tuple[PreTrainedConfig | None, Any]:
    """What a model's config and processor are; no config where `model` is the processor itself."""
    name = model if isinstance(model, (str, os.PathLike)) else None
    if name is not None:
        config = auto.config_of(name)
    elif isinstance(model, nn.Module):
        config = config_of(model)
    else:
        config = model if isinstance(model, PreTrainedConfig) else None
    if config is None and not isinstance(model, nn.Module):
        processor, model = processor or model, None
    if processor is None:
        if config is None:
            raise ValueError(f"a {type(model).__name__} says nothing of what reads its inputs: pass processor=")
        processor = load_processor(name or config.name_or_path, config)
    if not callable(processor):
        raise TypeError(
            f"model is a {type(processor).__name__}: pass the model, its name or folder, or its tokenizer, image processor or "
            "feature extractor"
        )
    return config, processor


def _kind_read_by(processor: Any) -> str:
    if isinstance(processor, PreTrainedTokenizerBase):
        return "text"
    return "audio" if isinstance(processor, SequenceFeatureExtractor) else "image"


def _mode_of(processor: Any) -> str:
    mean = getattr(processor, "image_mean", None)
    return "L" if isinstance(mean, (list, tuple)) and len(mean) == 1 else "RGB"


def _max_length(config: PreTrainedConfig | None, tokenizer: Any, max_length: int | None) -> int | None:
    most = None if config is None else most_positions(config)
    if max_length is not None:
        if most is not None and max_length > most:
            raise ValueError(f"max_length (--max-length) is {max_length}: the model reads at most {most} tokens")
        return max_length
    lengths = [each for each in (most, tokenizer.model_max_length) if each is not None and each < 10**9]
    return min(lengths, default=None)


def most_positions(config: PreTrainedConfig) -> int:
    """How many tokens a model can read."""
    encoder = MODEL_MAPPING.get(type(config), None)
    return (
        most_tokens(without_weights(encoder, config)) if isinstance(encoder, type) else config.max_position_embeddings
    )


def remember_max_length(tokenizer: Any, config: PreTrainedConfig, max_length: int | None, default: int) -> None:
    """Sets the length that texts are cut to in a tokenizer, with which it is saved: all that load it read alike.

    max_length: as in `load_data`; where it is None, the least of `default`, the tokenizer's own and what the model reads
    """
    if isinstance(tokenizer, PreTrainedTokenizerBase):
        own = _max_length(config, tokenizer, max_length)
        tokenizer.model_max_length = own if max_length is not None else min(default, own)


# Labels


def _add_labels(found: PreparedData, source: DataSource, config: PreTrainedConfig | None, is_required: bool) -> None:
    num_labels = getattr(config, "num_labels", None)
    try:
        column = find_label_column(found.rows, source, num_labels)
    except ValueError:
        if is_required or source.label is not None:
            raise
        return
    values = label_values(found.rows, column)
    names = class_names_of(found.rows, column, values)
    found.label, found.class_names = column, names
    is_zero_shot = config is not None and config.model_type in HEADS and auto.is_zero_shot(config)
    found.model_classes = None if config is None or is_zero_shot else model_classes(config)
    if values is None:
        found.notes.append(f"labels: column {column!r}, read row by row")
        return
    are_texts = column_kinds(found.rows)[column] == "text"
    if is_zero_shot:
        if names is None:
            raise ValueError(
                f"column {column!r} of {source.name} has no class names, of which the model's prompts are made"
            )
        found.labels, note = (
            class_indices(values, names, column, are_texts, source),
            f"{len(names)} classes named by the data",
        )
        check_classes(found.labels, len(names), source)
    elif config is None or num_labels == 1 or config.problem_type not in (None, "single_label_classification"):
        if are_texts:
            found._label(next(value for value in values if value is not None), 0)  # refuses names without a model
        found.labels, note = values, "taken as they are"
    else:
        indices = class_indices(values, names, column, are_texts, source)
        found.labels, note = match_labels(indices, names, column, are_texts, config, source)
        check_classes(found.labels, num_labels, source)
    found.notes.append(f"labels: column {column!r}, {note}")


def classes_in(source: DataSource) -> list[str]:
    """The names of the data's own classes in the order of their indices; LABEL_0, LABEL_1, ... where they have none."""
    rows, _, _ = load_rows(source)
    column = find_label_column(rows, source, None)
    values = label_values(rows, column)
    names = class_names_of(rows, column, values)
    if names is None:
        highest = max(class_indices(values, None, column, False, source))
        names = [f"LABEL_{index}" for index in range(highest + 1)]
    if len(names) < 2:
        raise ValueError(f"column {column!r} of {source.name} has {len(names)} class, so there is nothing to learn")
    return names
