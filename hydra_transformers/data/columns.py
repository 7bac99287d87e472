"""Finds the columns of a data set: those that a model reads, and the labels."""

import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from .audio import is_audio
from .tables import kind_of_cells, typed_values


# The usual names, first choice first.
INPUT_NAMES = {
    "text": ("text", "sentence", "content", "review", "question"),
    "words": ("tokens", "words"),
}
LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")
TAG_NAMES = ("ner_tags", "tags", "labels", "pos_tags", "upos", "label")
USUAL_NAMES = {*chain.from_iterable(INPUT_NAMES.values()), *LABEL_NAMES, *TAG_NAMES}
REMEMBERED = "data_columns"  # of a config: the columns that `finetune` has read
PLURALS = {"image": "images", "text": "texts", "audio": "audio", "words": "lists of words"}


@dataclass(frozen=True)
class LoadedData:
    """Rows that were read once, to be used several times, with their name in messages."""

    name: str
    rows: Any


@dataclass(frozen=True)
class DataSource:
    """The arguments of `load_data` that select rows and columns.

    remembered: names of columns that the model was fine-tuned on, {"column": [...], "label": ...};
        chosen where the data has them, and the user has named none
    """

    data: Any
    split: str | None = None
    part: str | None = None
    limit: int | None = None
    column: str | Sequence[str] | None = None
    label: str | None = None
    label_separator: str | None = None
    remembered: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_model(cls, config: Any, *arguments: Any) -> "DataSource":
        """Return a source with the columns that a model remembers in its config."""
        source = cls(*arguments)
        columns = getattr(config, REMEMBERED, None)
        if not isinstance(columns, Mapping):
            return source
        separator = source.label_separator
        if separator is None and source.label is None:
            separator = columns.get("label_separator")
        return replace(source, remembered=columns, label_separator=separator)

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        if isinstance(self.data, LoadedData):
            return self.data.name
        if isinstance(self.data, (str, os.PathLike)):
            return os.fspath(self.data)
        return "data"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `column` names: none, one, or two of pairs."""
        if isinstance(self.column, str):
            return (self.column,)
        return tuple(self.column or ())

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """Return the columns that `column` names, or those that are remembered, if all are among
        the names of the data."""
        if self.columns:
            return self.columns
        remembered = tuple(self.remembered.get("column") or ())
        if all(name in names for name in remembered):
            return remembered
        return ()

    def label_among(self, names: Collection[str]) -> str | None:
        """Return the column that `label` names, or the one that is remembered, if it is among the
        names of the data."""
        if self.label:
            return self.label
        remembered = self.remembered.get("label")
        return remembered if remembered in names else None


def feature_of(rows: Any, column: str) -> Any:
    """Return the feature of a column of `datasets`, or of the entries of its lists.

    None for other rows, which have no types.
    """
    features = getattr(rows, "features", None)
    if not features:
        return None
    feature = features[column]
    return getattr(feature, "feature", None) or feature


def column_kinds(rows: Any) -> dict[str, str]:
    """Return the kind of each column; of plain rows by the first one.

    A kind is "image", "text", "audio", "class", "words" (a list of texts), "classes" or "numbers"
    (lists of these), or the name of another type.
    """
    features = getattr(rows, "features", None)
    if features:
        return {name: _kind_of_feature(feature) for name, feature in features.items()}
    if not isinstance(rows[0], Mapping):
        raise TypeError(f"a row of data is a {type(rows[0]).__name__}: each row must be a dict of columns")
    return {name: _kind_of_value(value) for name, value in rows[0].items()}


def _has_cells(rows: Any, column: str) -> bool:
    """Whether a column is of a csv file, whose cells have no type."""
    return kind_of_cells(feature_of(rows, column)) is not None


def values_of(rows: Any, column: str) -> list[Any]:
    """Return a column of the rows; that of a csv file with the type that its cells look like."""
    if not hasattr(rows, "features"):
        return [row.get(column) for row in rows]
    values = list(rows[column])
    kind = kind_of_cells(feature_of(rows, column))
    if kind is None:
        return values
    return typed_values(values, kind)


def _kind_of_feature(feature: Any) -> str:
    kind = kind_of_cells(feature)
    if kind is not None:
        return kind
    name = type(feature).__name__
    if name == "Value":
        is_text = feature.dtype in ("string", "large_string")
        return "text" if is_text else feature.dtype
    inside = getattr(feature, "feature", None)
    if type(inside).__name__ in ("Value", "ClassLabel"):
        kinds_of_lists = {"text": "words", "class": "classes"}
        return kinds_of_lists.get(_kind_of_feature(inside), "numbers")
    kinds = {"Image": "image", "ClassLabel": "class", "Audio": "audio"}
    return kinds.get(name, name)


def _kind_of_value(value: Any) -> str:
    if hasattr(value, "convert") and hasattr(value, "size"):
        return "image"
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1:
        are_texts = len(value) > 0 and isinstance(value[0], str)
        return "words" if are_texts else "numbers"
    if isinstance(value, str):
        return "text"
    if is_audio(value):
        return "audio"
    return type(value).__name__


def find_words(rows: Any, source: DataSource) -> str | None:
    """Return the column of lists of words, which have tags; None where the rows are texts."""
    kinds = column_kinds(rows)
    candidates = source.columns_among(kinds)
    if len(candidates) > 1:
        return None  # pairs of texts
    # Beside a column of texts, words are read only where they are named.
    beside_texts = (*TAG_NAMES, "id", "lang")
    has_texts = any(kind == "text" and name not in beside_texts for name, kind in kinds.items())
    if not candidates and not has_texts:
        candidates = INPUT_NAMES["words"]
    for name in candidates:
        if kinds.get(name) == "words":
            return name
    return None


def find_columns(rows: Any, kind: str, source: DataSource) -> tuple[str, ...]:
    """Return the column of images, audio, texts or words; two for text pairs.

    kind: "image", "audio", "text" or "words"
    """
    # Those that are named, or that the model was fine-tuned on
    kinds = column_kinds(rows)
    columns = source.columns_among(kinds)
    if columns:
        most = 2 if kind == "text" else 1
        if len(columns) > most:
            raise ValueError(f"column is {columns!r}: name one, or two of pairs for a model of texts")
        return tuple(_existing(name, kinds, source) for name in columns)

    # The only one that may be meant; texts of a csv file may all be numbers.
    if kind == "text":
        for name in INPUT_NAMES["text"]:
            if name in kinds and _has_cells(rows, name):
                kinds[name] = "text"
    title = "column of words" if kind == "words" else f"{kind} column"
    matching = _input_columns(kinds, kind, source)
    return (_one_of(matching, title, kinds, source, kind),)


def _input_columns(kinds: Mapping[str, str], kind: str, source: DataSource) -> list[str]:
    """Return the columns that may be the inputs of this kind: the one with the usual name alone,
    else those that have no name of labels."""
    matching = [name for name in kinds if kinds[name] == kind and name != source.label]
    for name in INPUT_NAMES.get(kind, ()):
        if name in matching:
            return [name]
    label_names = TAG_NAMES if kind == "words" else LABEL_NAMES
    inputs = [name for name in matching if name not in label_names]
    if inputs:
        return inputs
    # Only inputs are left where the labels are known, and images and audio are no labels.
    if source.label is not None or kind in ("image", "audio"):
        return matching
    return []


def find_label_column(rows: Any, source: DataSource, words: str | None = None) -> str:
    """Return the column of classes, or of lists of them; of several (coarse and fine labels, POS
    and NER) the one with a usual name.

    words: the column of words, whose tags are the labels
    """
    kinds = column_kinds(rows)
    label = source.label_among(kinds)
    if label:
        return _existing(label, kinds, source)

    # The kind of labels decides first, then the usual names.
    if words is not None:
        title = "column of tags"
        columns = [name for name in kinds if kinds[name] in ("words", "classes", "numbers") and name != words]
        usual = [name for name in TAG_NAMES if name in columns]
    else:
        title = "label column"
        columns = [name for name in kinds if kinds[name] == "class"]
        columns = columns or [name for name in kinds if kinds[name] == "classes"]
        usual = [name for name in LABEL_NAMES if name in kinds]
    if usual and len(columns) != 1:
        columns = usual[:1]
    return _one_of(columns, title, kinds, source)


def _existing(column: str, kinds: Mapping[str, str], source: DataSource) -> str:
    if column not in kinds:
        raise ValueError(f"{source.name} has no column {column!r}: it has {', '.join(kinds)}")
    return column


def _one_of(
    matching: Sequence[str], title: str, kinds: Mapping[str, str], source: DataSource, kind: str | None = None
) -> str:
    """Return the only matching column; raise where there is none, or more than one.

    kind: of inputs; None for labels
    """
    if len(matching) == 1:
        return matching[0]
    argument = "label" if kind is None else "column"
    found = f"no {title} among {', '.join(kinds)}"
    if matching:
        found = f"more than one {title} among {', '.join(kinds)}"
    elif kind is not None:
        found += f", and the model reads {PLURALS[kind]}"
    raise ValueError(f"{source.name} has {found}: name it as {argument}= (--{argument})")


def without_missing_columns(source: DataSource, rows: Any) -> DataSource:
    """Forget column names that this set does not have: they were named for the labelled data."""
    kinds = column_kinds(rows)
    columns = source.columns
    if all(column in kinds for column in columns):
        return source
    if len(columns) == 2:  # single texts would differ from pairs by their form alone
        named = " and ".join(map(repr, columns))
        raise ValueError(
            f"{source.name} has no columns {named}, and is to be compared with pairs of texts: rename two of its "
            f"columns ({', '.join(kinds)})"
        )
    warnings.warn(f"{source.name} has no column {columns[0]!r}: another one is read", stacklevel=3)
    return replace(source, column=None)


def check_none_is_missing(rows: Any, column: str, kind: str, source: DataSource) -> None:
    """Raise for rows without an input before any is read."""
    if not hasattr(rows, "features") or rows.data.column(column).null_count == 0:
        return
    images_undecoded = rows.with_format("arrow")
    missing = images_undecoded[column].is_null().to_numpy().nonzero()[0]
    if not len(missing):  # rows that a selection left out also count as null
        return
    which = source.name
    if source.part is not None:
        which = f"the part {source.part} of {source.name}"
    raise ValueError(
        f"{len(missing)} of {len(rows):,} rows of {which} have no {kind} in the column {column!r}, the first is row "
        f"{missing[0]}: fill or remove them"
    )
