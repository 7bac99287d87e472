"""`load_data`: a user's data set, in any form, as rows that a model reads."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import MODEL_MAPPING, PreTrainedConfig, PreTrainedTokenizerBase, SequenceFeatureExtractor

from ..fusion.structure import without_weights
from ..model_info import ModelInfo, class_names_of
from ..models.inputs import image_mode, most_tokens, read_image
from .audio import prepared_audio, undecoded
from .batches import AUDIO_INPUTS, LABEL_NAMES
from .columns import (
    PLURALS,
    check_none_is_missing,
    find_columns,
    find_label_column,
    find_words,
    without_missing_columns,
)
from .labels import LabelLists, Labels, has_lists
from .processors import load_processor
from .rows import DataSource, as_rows, is_dataframe, load_rows
from .tags import TOKEN_CLASSIFICATION, tokens_of_words


MULTI_LABEL = "multi_label_classification"


@dataclass
class PreparedData(torch.utils.data.Dataset):
    """Rows of model inputs, each processed when it is read. Made by `load_data`.

    A row is `{"pixel_values": ...}`, `{"input_ids": ..., ...}` or `{"input_values": ...}`, with
    `labels` where the data has any.

    kind: "image", "text", "audio", or "words" for texts that are lists of words, with a tag for
        each
    columns: the one that is read, or two of text pairs
    labels: of all rows, as the model's class indices, or for a multi-label model a 0. or 1. for
        each; None without labels
    class_names: the data's own classes, in order; None where they have no names
    notes: sentences about what was found and chosen
    max_length: the tokens that a text, or a pair together, is cut to; None for no limit
    image_mode: the Pillow mode that the model reads
    change: a function applied to each image or text before it is processed
    split: the one that the rows are of, whole or in part; None where the data has none
    label: the column of labels; None without labels
    """

    rows: Any
    processor: Any
    kind: str
    columns: tuple[str, ...]
    labels: list[Any] | None = None
    class_names: list[str] | None = None
    notes: list[str] = field(default_factory=list)
    max_length: int | None = None
    image_mode: str = "RGB"
    change: Callable[[Any], Any] | None = None
    split: str | None = None
    label: str | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = None
        if self.labels is not None:
            label = self.labels[index]
        try:
            row = self.rows[index]
            values = [row[column] for column in self.columns]
            if self.kind == "words":
                return tokens_of_words(self.processor, values[0], label, max_length=self.max_length)
            prepared = self._prepared(values)
        except (TypeError, ValueError, AttributeError, OSError) as error:
            raise ValueError(
                f"row {index} of the data cannot be read as {self.kind} ({error}): pass {PLURALS[self.kind]} in "
                f"{self.columns[0]!r}, or name their column as column="
            ) from error
        if self.labels is None:
            return prepared
        return {**prepared, "labels": label}

    def _prepared(self, values: list[Any]) -> dict[str, Any]:
        """Return the inputs that the processor makes of the columns of a row."""
        is_text = self.kind == "text"
        for value in values:  # a processor would open the file that a text names
            if isinstance(value, str) != is_text and self.kind != "audio":
                raise TypeError(f"it is a {type(value).__name__}")
        if self.kind == "audio":
            return prepared_audio(values[0], self.processor)
        if is_text:
            if self.change is not None:
                values = list(map(self.change, values))
            return dict(self.processor(*values, truncation=True, max_length=self.max_length))

        image = values[0]
        if hasattr(image, "mode"):
            image = read_image(image, "it", self.image_mode)
        if self.change is not None:
            image = self.change(image)
        pixels = self.processor(images=image, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels[0]}


def load_data(
    data: Any,
    model: Any,
    *,
    split: str | None = None,
    part: str | None = None,
    limit: int | None = None,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    label_separator: str | None = None,
    labelled: bool | None = None,
    max_length: int | None = None,
    processor: Any = None,
) -> PreparedData:
    """Read a data set of images, texts or audio for a model: for fine-tuning, circuits, calibration
    and reports.

    Args:
        data (`str`, `os.PathLike`, `DataFrame`, `Dataset` or `list[dict]`): the name of a data set
            on the Hub ("cifar100", with a config "glue:sst2"); a folder of images or audio, of csv,
            json or parquet files, or written by `save_to_disk`; one such file; a DataFrame; a
            Dataset or DatasetDict of `datasets`; or a list of dict rows.
        model (`PreTrainedModel`, `str`, `os.PathLike` or tokenizer): the model that reads the data,
            or its folder, Hub name or config; its class names are matched with those of the data.
            Or only its tokenizer, image processor or feature extractor: labels are then taken as
            they are.
        split (`str`, *optional*): such as "train" or "train[:10%]"; by default the first of
            validation, test and train.
        part (`str`, *optional*): "training", "validation" or "test": the split with that purpose if
            it has labels, else a random tenth of the first split, the same each time, cut out
            before any limit.
        limit (`int`, *optional*): at most this many rows, drawn at random with seed 0, because many
            sets are sorted by class.
        column (`str` or pair of `str`, *optional*): of the images, texts or audio, ("premise",
            "hypothesis") for pairs of texts; by default found. A classifier of tokens reads lists
            of words.
        label (`str`, *optional*): the column of labels; by default found. A classifier of tokens
            reads lists of tags, a name or number for each word.
        label_separator (`str`, *optional*): what stands between the labels of a cell, such as "|",
            for multi-label data in csv files.
        labelled (`bool`, *optional*): True raises for data without labels; False leaves labels out,
            for out-of-distribution data, whose columns may have other names. By default labels are
            read where the data has any.
        max_length (`int`, *optional*): the tokens that a text, or a pair together, is cut to; by
            default the tokenizer's own limit, or the model's if it is lower.
        processor (*optional*): the tokenizer, image processor, feature extractor or pair; by
            default the one saved with the model.

    Returns:
        `PreparedData`: rows of model inputs, each processed when it is read; texts are padded to
        the longest of their batch.

        >>> columns = ("sentence1", "sentence2")
        >>> data = load_data("glue:mrpc", model, split="validation", column=columns)
    """
    if isinstance(data, PreparedData):
        return data
    info, processor = _info_and_processor(model, processor)
    config = None
    if info is not None:
        config = info.config

    # The rows, and which columns are read
    source = DataSource.of_model(config, data, split, part, limit, column, label, label_separator)
    loaded = load_rows(source)
    rows = undecoded(loaded.rows)
    if labelled is False:
        source = without_missing_columns(source, rows)
    kind = _kind_of(processor, info)
    columns = find_columns(rows, kind, source)
    for name in columns:
        check_none_is_missing(rows, name, kind, source)
    if kind == "image":
        rows = _with_decoded_images(rows, columns[0])

    # How they become inputs, and their labels
    prepared = PreparedData(rows, processor, kind, columns, notes=[loaded.note], split=loaded.split)
    if labelled is not False:
        _add_labels(prepared, source, info, is_required=bool(labelled))
    if config is not None:
        prepared.image_mode = image_mode(config)
    elif len(getattr(processor, "image_mean", None) or ()) == 1:
        prepared.image_mode = "L"
    if kind in ("text", "words"):
        prepared.max_length = _max_length(config, processor, max_length)
    prepared.notes.append(f"{PLURALS[kind]}: {_describe_columns(prepared)}")
    return prepared


def _with_decoded_images(rows: Any, column: str) -> Any:
    """Return rows of `datasets` with images that are decoded when read; other rows as they are."""
    if not hasattr(rows, "features"):
        return rows
    feature = rows.features[column]
    if getattr(feature, "decode", True):
        return rows
    return rows.cast_column(column, type(feature)())


def _describe_columns(data: PreparedData) -> str:
    """Return in words which columns are read, and how much of a text."""
    if len(data.columns) == 1:
        named = f"column {data.columns[0]!r}"
    else:
        named = "pairs of the columns {!r} and {!r}".format(*data.columns)
    if data.max_length is not None:
        named += f", at most {data.max_length} tokens"
    return named


def load_if_named(data: Any, model: Any, **settings: Any) -> Any:
    """Load data by Hub name, folder or file, and DataFrames, also in a dict of several.

    Other data is returned as it is.

    settings: of `load_data`; those that name columns are refused where there is nothing to load
    """
    if isinstance(data, Mapping):
        return {name: load_if_named(part, model, **settings) for name, part in data.items()}
    if isinstance(data, (str, os.PathLike)):
        return load_data(data, model, **settings)
    if is_dataframe(data):
        if {"input_ids", "pixel_values", *AUDIO_INPUTS} & set(data.columns):
            return as_rows(data)
        return load_data(data, model, **settings | {"split": None})  # it has no splits

    named = [name for name in ("column", "label") if settings.get(name) is not None]
    # Out-of-distribution data may have another form than the labelled data.
    if named and settings.get("labelled"):
        name = named[0]
        raise ValueError(
            f"{name} is for a name, file, folder or DataFrame, and data is a {type(data).__name__}: pass "
            f"load_data(data, model, {name}={settings[name]!r})"
        )
    check_class_order(data, model)
    return data


def check_class_order(data: Any, model: Any) -> None:
    """Raise for prepared rows whose labels count the model's classes in another order."""
    classes = class_names_of(model)
    if not classes:
        return
    features = getattr(data, "features", None) or {}
    for column in LABEL_NAMES:
        names = getattr(features.get(column), "names", None)
        if names is not None and names != classes and sorted(names) == sorted(classes):
            raise ValueError(
                f"column {column!r} has the model's classes in another order: pass load_data(rows, model)"
            )


def ood_groups(ood_data: Any) -> dict[str, dict[str, Any]]:
    """Return out-of-distribution data as group -> name -> data.

    ood_data: one data set, data sets by name, or groups of these
    """
    if ood_data is None:
        return {}
    sets = {"ood_data": ood_data}
    if isinstance(ood_data, Mapping):
        sets = dict(ood_data)
    are_groups = [isinstance(inner, Mapping) for inner in sets.values()]
    if all(are_groups):
        return sets
    if any(are_groups):
        raise TypeError('ood_data has data sets beside groups: pass {"near": {name: data}, "far": {name: data}}')
    return {"OOD": sets}


def check_has_variety(data: PreparedData, name: str, purpose: str) -> None:
    """Raise for a single row, and for rows of one class.

    purpose: what the rows are for, such as "to learn"
    """
    if len(set(map(str, data.labels))) < 2:
        raise ValueError(
            f"the {len(data):,} rows of {name} are too few, or all have the same label, so there is nothing "
            f"{purpose}: where rows are sorted by class, read all of them, or draw some with limit= (--limit)"
        )


def _info_and_processor(model: Any, processor: Any) -> tuple[ModelInfo | None, Any]:
    """Return what a model is, and its processor.

    The first is None where `model` is the processor itself, or has no config.
    """
    info = None
    if isinstance(model, (ModelInfo, str, os.PathLike, PreTrainedConfig, nn.Module)):
        info = ModelInfo.of(model)
    else:
        processor = processor or model
    if info is not None and info.config is None:
        info = None

    if processor is None and info is not None:
        name = info.config.name_or_path
        if isinstance(model, (str, os.PathLike)):
            name = model
        processor = load_processor(name, info)
    if not callable(processor):
        raise TypeError(
            f"model is a {type(model).__name__}: pass the model, its name or folder, or its tokenizer, image "
            "processor or feature extractor; of a model without a config its processor= besides"
        )
    return info, processor


def _kind_of(processor: Any, info: ModelInfo | None) -> str:
    """Return what the data are that a processor reads for a model, as `PreparedData.kind`."""
    if isinstance(processor, SequenceFeatureExtractor):
        return "audio"
    if not isinstance(processor, PreTrainedTokenizerBase):
        return "image"
    if info is not None and info.task.name == TOKEN_CLASSIFICATION:
        return "words"
    return "text"


def _max_length(config: PreTrainedConfig | None, tokenizer: Any, max_length: int | None) -> int | None:
    """Return how many tokens of a text are read; None for no limit."""
    most = getattr(config, "max_position_embeddings", None)
    encoder = MODEL_MAPPING.get(type(config), None)
    if isinstance(encoder, type):
        most = most_tokens(without_weights(encoder, config))

    if max_length is None:
        limits = (most, tokenizer.model_max_length)
        # Tokenizers without a limit have one of 10**30.
        lengths = [length for length in limits if length is not None and length < 10**9]
        return min(lengths, default=None)
    if most is not None and max_length > most:
        raise ValueError(f"max_length is {max_length}: the model reads at most {most} tokens")
    return max_length


def remember_max_length(tokenizer: Any, config: PreTrainedConfig, max_length: int | None, default: int) -> None:
    """Set a tokenizer's length limit, which is saved with it.

    max_length: as in `load_data`; if None, the least of `default`, the tokenizer's own limit and
        the model's
    """
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    length = _max_length(config, tokenizer, max_length)
    if max_length is None:
        length = min(default, length)
    tokenizer.model_max_length = length


def _add_labels(data: PreparedData, source: DataSource, info: ModelInfo | None, is_required: bool) -> None:
    """Read the labels as the model's task reads them; without a model take them as they are."""
    words = None
    if data.kind == "words":
        words = data.columns[0]
    try:
        column = find_label_column(data.rows, source, words)
    except ValueError:
        if is_required or source.label is not None:
            raise
        return

    reads_lists = info is not None and info.task.reads_lists
    label_class = LabelLists if reads_lists else Labels
    labels = label_class(data.rows, column, source)

    # As the model counts them, where it says what it predicts
    data.class_names = labels.names
    if info is not None and info.is_zero_shot:
        if labels.names is None:
            raise ValueError(f"column {column!r} of {source.name} has no class names, which the prompts are made of")
        data.labels = labels.indices()
    elif info is not None and info.says_task:
        words_of_rows = None
        if words is not None:
            words_of_rows = [row[words] for row in data.rows]
        data.labels = info.task.read_labels(labels, info.class_names, words_of_rows)
    elif labels.are_texts:
        raise ValueError(f"the labels of {source.name} are names: pass the model in place of its processor")
    else:
        data.labels = labels.values
    data.label = column
    data.notes.append(f"labels: column {column!r}")


def classes_in(source: DataSource, are_numbers: bool = False) -> tuple[list[str], str | None]:
    """Return the data's own classes, and the problem type that their labels mean.

    Args:
        source (`DataSource`): The rows and their columns.
        are_numbers (`bool`, defaults to `False`): Whether labels are numbers for regression, be
            they whole or not.

    Returns:
        `tuple[list[str], str | None]`: The names of the classes in the order of their indices;
        LABEL_0, LABEL_1, ... where they have none. And "multi_label_classification" where rows have
        lists of labels, "token_classification" where words have tags, "regression" where labels are
        numbers and not all whole, else None.
    """
    loaded = load_rows(source)
    rows = loaded.rows

    # The labels decide the task: tags of words, lists, numbers, or one class for each row.
    words = find_words(rows, source)
    column = find_label_column(rows, source, words)
    problem_type = None
    if words is not None:
        names = LabelLists(rows, column, source).classes(are_tags=True)
        problem_type = TOKEN_CLASSIFICATION
    elif not are_numbers and has_lists(rows, column, source):
        names = LabelLists(rows, column, source).classes()
        problem_type = MULTI_LABEL
    else:
        labels = Labels(rows, column, source)
        if are_numbers or labels.are_numbers():
            labels.numbers(1)  # raises for others
            return [column], "regression"
        names = labels.classes()
        # With splits of its own, one row of each class may be all there is to learn from.
        if loaded.is_cut:
            _check_classes_repeat(labels.values, column, source)

    fewest = 2 if problem_type is None else 1
    if len(names) < fewest:
        raise ValueError(f"column {column!r} of {source.name} has {len(names)} class, so there is nothing to learn")
    return names, problem_type


def _check_classes_repeat(values: Sequence[Any], column: str, source: DataSource) -> None:
    """Raise where labels have fewer than two rows each, as names and numbers of rows have."""
    count = len(set(map(str, values)))
    if count <= max(2, len(values) / 2):
        return
    found = f"{count:,} labels in {len(values):,} rows"
    if count == len(values):
        found = "another label in each row"
    raise ValueError(
        f"column {column!r} of {source.name} has {found}, too many to learn: name another one as label= (--label), or "
        "predict numbers, regression=True (--regression)"
    )
