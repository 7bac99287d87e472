"""Finds the columns of a data set: those that a model reads, and the labels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .rows import DataSource
from .sounds import is_sound


# The usual names, first choice first.
TEXT_NAMES = ("text", "sentence", "content", "review", "question")
LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")
PLURALS = {
    "image": "images",
    "text": "texts",
    "audio": "sounds",
    "words": "lists of words",
    "class": "class indices",
    "classes": "lists of classes",
}
SCALARS = ("bool", "float", "int", "uint", "text", "class", "image", "audio")
KINDS_OF_FEATURES = {"Image": "image", "ClassLabel": "class", "Audio": "audio"}


def column_kinds(rows: Any) -> dict[str, str]:
    """Column -> "image", "text", "audio", "class", "classes" (a list of them), or the name of another type. Plain rows are
    read by the first one."""
    features = getattr(rows, "features", None)
    if features:
        return {name: _kind_of_feature(feature) for name, feature in features.items()}
    if not isinstance(rows[0], Mapping):
        raise TypeError(f"a row of data is a {type(rows[0]).__name__}: each row must be a dict of columns")
    return {name: _kind_of_value(value) for name, value in rows[0].items()}


def _kind_of_feature(feature: Any) -> str:
    name = type(feature).__name__
    if name == "Value":
        return "text" if feature.dtype in ("string", "large_string") else feature.dtype
    if type(getattr(feature, "feature", None)).__name__ == "ClassLabel":
        return "classes"
    return KINDS_OF_FEATURES.get(name, name)


def _kind_of_value(value: Any) -> str:
    if hasattr(value, "convert") and hasattr(value, "size"):
        return "image"
    return "text" if isinstance(value, str) else "audio" if is_sound(value) else type(value).__name__


def find_columns(rows: Any, kind: str, source: DataSource) -> tuple[str, ...]:
    """The column of images, sounds or texts (`kind`: "image", "audio", "text"); two where the source names text pairs."""
    kinds = column_kinds(rows)
    given = {"image": source.image, "audio": source.audio, "text": source.text}
    other = next((column for name, column in given.items() if name != kind and column is not None), None)
    if other is not None:
        raise ValueError(f"the column {other!r} does not go with a model of {PLURALS[kind]}: name it as {kind}=")
    named = source.text_columns if kind == "text" else tuple(filter(None, [given[kind]]))
    if len(named) > 2:
        raise ValueError(f"text is {source.text!r}: name one column, or two of pairs")
    for name in named:
        _check_exists(name, kinds, source)
        if hasattr(rows, "features") and kinds[name] != kind and kinds[name].startswith(SCALARS):
            raise ValueError(
                f"the column {name!r} of {source.name} holds {PLURALS.get(kinds[name], kinds[name])}, no {PLURALS[kind]}: name another"
            )
    if named:
        return named
    found = [name for name in kinds if kinds[name] == kind and not (kind == "text" and name in LABEL_NAMES)]
    usual = [name for name in TEXT_NAMES if name in found]
    return (_one_of(usual[:1] if kind == "text" and usual else found, kind, kinds, source),)


def find_label_column(rows: Any, source: DataSource, num_labels: int | None) -> str:
    """The column of classes, or of lists of them; of several (coarse and fine labels) the one with as many classes as the
    model."""
    kinds = column_kinds(rows)
    if source.label is not None:
        _check_exists(source.label, kinds, source)
        return source.label
    classes = [name for name in kinds if kinds[name] == "class"]
    classes = classes or [name for name in kinds if kinds[name] == "classes"]
    fitting = [name for name in classes if _num_classes(rows.features[name]) == num_labels]
    usual = [name for name in LABEL_NAMES if name in kinds]
    found = fitting if len(fitting) == 1 else classes if len(classes) == 1 else usual[:1] or classes
    return _one_of(found, "label", kinds, source)


def _num_classes(feature: Any) -> int:
    return getattr(feature, "feature", feature).num_classes


def _check_exists(column: str, kinds: Mapping[str, str], source: DataSource) -> None:
    if column not in kinds:
        raise ValueError(f"{source.name} has no column {column!r}: it has {', '.join(kinds)}")


def _one_of(found: Sequence[str], kind: str, kinds: Mapping[str, str], source: DataSource) -> str:
    if len(found) == 1:
        return found[0]
    pairs = ", or two of pairs as FIRST,SECOND" if kind == "text" and found else ""
    raise ValueError(
        f"{source.name} has {'more than one' if found else 'no'} {kind} column among {', '.join(kinds)}: name it as {kind}= "
        f"(--{kind}-column){pairs}"
    )


def without_missing_columns(source: DataSource, rows: Any) -> DataSource:
    """Forgets column names that this set does not have: they were given for the labelled data."""
    kinds = column_kinds(rows)
    text = source.text
    if any(column not in kinds for column in source.text_columns):
        text = None
        if len(source.text_columns) == 2:  # single texts would differ from pairs by their form alone
            text = [name for name in kinds if kinds[name] == "text" and name not in LABEL_NAMES]
            if len(text) != 2:
                raise ValueError(
                    f"{source.name} has no columns {' and '.join(map(repr, source.text_columns))}, nor just two of texts, and "
                    f"is to be compared with pairs: rename two of its columns ({', '.join(kinds)})"
                )
    image, audio = (name if name in kinds else None for name in (source.image, source.audio))
    return replace(source, image=image, audio=audio, text=text)


def check_none_is_missing(rows: Any, column: str, kind: str, source: DataSource) -> None:
    if not hasattr(rows, "features") or rows.data.column(column).null_count == 0:
        return
    if kind == "image":
        rows = rows.cast_column(column, type(rows.features[column])(decode=False))
    missing = sum(value is None for value in rows[column])
    if missing:  # rows that a selection left out also count as null
        raise ValueError(
            f"{missing} of {len(rows):,} rows of {source.name} have no {kind} in the column {column!r}: fill or remove them"
        )
