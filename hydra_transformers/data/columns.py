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
INPUT_NAMES = {"text": ("text", "sentence", "content", "review", "question"), "words": ("tokens", "words")}
LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")
TAG_NAMES = ("ner_tags", "tags", "labels", "pos_tags", "upos", "label")
USUAL_NAMES = {*chain.from_iterable(INPUT_NAMES.values()), *LABEL_NAMES, *TAG_NAMES}
REMEMBERED = "data_columns"  # of a config: the columns that `finetune` has read
PLURALS = {"image": "images", "text": "texts", "audio": "audio", "words": "lists of words"}


@dataclass(frozen=True)
class LoadedData:
    """Rows that were read once, to be used several times, with the name that they have in messages."""

    name: str
    rows: Any


@dataclass(frozen=True)
class DataSource:
    """The arguments of `load_data` that select rows and columns.

    remembered: names of columns that the model was fine-tuned on, {"column": [...], "label": ...}; chosen where the data has
        them, and the user has named none
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
        separator = columns.get("label_separator") if source.label is None else None
        return replace(source, remembered=columns, label_separator=source.label_separator or separator)

    @property
    def name(self) -> str:
        """The name of the data in messages."""
        if isinstance(self.data, LoadedData):
            return self.data.name
        return os.fspath(self.data) if isinstance(self.data, (str, os.PathLike)) else "data"

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that `column` names: none, one, or two of pairs."""
        return (self.column,) if isinstance(self.column, str) else tuple(self.column or ())

    def columns_among(self, names: Collection[str]) -> tuple[str, ...]:
        """The columns that `column` names, or those that are remembered, if all are among the names of the data."""
        remembered = tuple(self.remembered.get("column") or ())
        return self.columns or (remembered if all(name in names for name in remembered) else ())

    def label_among(self, names: Collection[str]) -> str | None:
        """The column that `label` names, or the one that is remembered, if it is among the names of the data."""
        remembered = self.remembered.get("label")
        return self.label or (remembered if remembered in names else None)


def feature_of(rows: Any, column: str) -> Any:
    """The feature of a column of `datasets`, or of the entries of its lists; None for other rows."""
    feature = rows.features[column] if getattr(rows, "features", None) else None
    return getattr(feature, "feature", None) or feature


def column_kinds(rows: Any) -> dict[str, str]:
    """Column -> "image", "text", "audio", "class", "words" (a list of texts), "classes" or "numbers" (lists of these), or the
    name of another type. Plain rows are read by the first one."""
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
    return values if kind is None else typed_values(values, kind)


def _kind_of_feature(feature: Any) -> str:
    if (kind := kind_of_cells(feature)) is not None:
        return kind
    name, inside = type(feature).__name__, getattr(feature, "feature", None)
    if name == "Value":
        return "text" if feature.dtype in ("string", "large_string") else feature.dtype
    if type(inside).__name__ in ("Value", "ClassLabel"):
        return {"text": "words", "class": "classes"}.get(_kind_of_feature(inside), "numbers")
    return {"Image": "image", "ClassLabel": "class", "Audio": "audio"}.get(name, name)


def _kind_of_value(value: Any) -> str:
    if hasattr(value, "convert") and hasattr(value, "size"):
        return "image"
    if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) == 1:
        return "words" if len(value) and isinstance(value[0], str) else "numbers"
    return "text" if isinstance(value, str) else "audio" if is_audio(value) else type(value).__name__


def find_words(rows: Any, source: DataSource) -> str | None:
    """The column of lists of words, which have tags; None where the rows are texts."""
    kinds, usual = column_kinds(rows), INPUT_NAMES["words"]
    if any(kind == "text" and name not in (*TAG_NAMES, "id", "lang") for name, kind in kinds.items()):
        usual = ()
    columns = source.columns_among(kinds)
    words = [name for name in columns or usual if kinds.get(name) == "words"]
    return words[0] if words and len(columns) < 2 else None


def find_columns(rows: Any, kind: str, source: DataSource) -> tuple[str, ...]:
    """The column of images, audio, texts or words (`kind`: "image", "audio", "text", "words"); two for text pairs."""
    kinds = column_kinds(rows)
    if columns := source.columns_among(kinds):
        if len(columns) > (2 if kind == "text" else 1):
            raise ValueError(f"column is {columns!r}: name one, or two of pairs for a model of texts")
        return tuple(_existing(name, kinds, source) for name in columns)
    if kind == "text":  # texts of a csv file may all be numbers
        kinds = {
            name: "text" if name in INPUT_NAMES["text"] and _has_cells(rows, name) else kinds[name] for name in kinds
        }
    matching = [name for name in kinds if kinds[name] == kind and name != source.label]
    usual = [name for name in INPUT_NAMES.get(kind, ()) if name in matching]
    inputs = [name for name in matching if name not in (TAG_NAMES if kind == "words" else LABEL_NAMES)]
    matching = usual[:1] or inputs or (matching if source.label is not None or kind in ("image", "audio") else [])
    return (_one_of(matching, "column of words" if kind == "words" else f"{kind} column", kinds, source, kind),)


def find_label_column(rows: Any, source: DataSource, words: str | None = None) -> str:
    """The column of classes, or of lists of them; of several (coarse and fine labels, POS and NER) the one with a usual name.

    words: the column of words, whose tags are the labels
    """
    kinds = column_kinds(rows)
    if label := source.label_among(kinds):
        return _existing(label, kinds, source)
    if words is not None:
        columns = [name for name in kinds if kinds[name] in ("words", "classes", "numbers") and name != words]
        usual = [name for name in TAG_NAMES if name in columns]
    else:
        columns = [name for name in kinds if kinds[name] == "class"]
        columns = columns or [name for name in kinds if kinds[name] == "classes"]
        usual = [name for name in LABEL_NAMES if name in kinds]
    matching = columns if len(columns) == 1 else usual[:1] or columns
    return _one_of(matching, "label column" if words is None else "column of tags", kinds, source)


def _existing(column: str, kinds: Mapping[str, str], source: DataSource) -> str:
    if column not in kinds:
        raise ValueError(f"{source.name} has no column {column!r}: it has {', '.join(kinds)}")
    return column


def _one_of(
    matching: Sequence[str], title: str, kinds: Mapping[str, str], source: DataSource, kind: str | None = None
) -> str:
    """The only matching column. kind: of inputs; None for labels"""
    if len(matching) != 1:
        count = f"{'more than one' if matching else 'no'} {title} among {', '.join(kinds)}"
        reads = "" if matching or kind is None else f", and the model reads {PLURALS[kind]}"
        argument = "label" if kind is None else "column"
        raise ValueError(f"{source.name} has {count}{reads}: name it as {argument}= (--{argument})")
    return matching[0]


def without_missing_columns(source: DataSource, rows: Any) -> DataSource:
    """Forgets column names that this set does not have: they were named for the labelled data."""
    kinds, columns = column_kinds(rows), source.columns
    if all(column in kinds for column in columns):
        return source
    if len(columns) == 2:  # single texts would differ from pairs by their form alone
        raise ValueError(
            f"{source.name} has no columns {' and '.join(map(repr, columns))}, and is to be compared with pairs of texts: rename "
            f"two of its columns ({', '.join(kinds)})"
        )
    warnings.warn(f"{source.name} has no column {columns[0]!r}: another one is read", stacklevel=3)
    return replace(source, column=None)


def check_none_is_missing(rows: Any, column: str, kind: str, source: DataSource) -> None:
    """Raises for rows without an input before any is read."""
    if not hasattr(rows, "features") or rows.data.column(column).null_count == 0:
        return
    missing = rows.with_format("arrow")[column].is_null().to_numpy().nonzero()[0]  # images stay undecoded
    if len(missing):  # rows that a selection left out also count as null
        which = "" if source.part is None else f"the part {source.part} of "
        raise ValueError(
            f"{len(missing)} of {len(rows):,} rows of {which}{source.name} have no {kind} in the column {column!r}, the first is row "
            f"{missing[0]}: fill or remove them"
        )
