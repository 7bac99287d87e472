"""Finds the columns of a data set: those that a model reads, and the labels."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from .audio import is_audio
from .source import DataSource


# The usual names, first choice first.
TEXT_NAMES = ("text", "sentence", "content", "review", "question")
LABEL_NAMES = ("label", "labels", "fine_label", "target", "class")
WORD_NAMES = ("tokens", "words")
TAG_NAMES = ("ner_tags", "tags", "labels", "pos_tags", "upos", "label")
PLURALS = {"image": "images", "text": "texts", "audio": "audio", "words": "lists of words", "class": "class indices"}
SCALARS = ("bool", "float", "int", "uint", "text", "class", "image", "audio")


def column_kinds(rows: Any) -> dict[str, str]:
    """Column -> "image", "text", "audio", "class", "words" (a list of texts), "classes" or "numbers" (lists of these), or the
    name of another type. Plain rows are read by the first one."""
    features = getattr(rows, "features", None)
    if features:
        return {name: _kind_of_feature(feature) for name, feature in features.items()}
    if not isinstance(rows[0], Mapping):
        raise TypeError(f"a row of data is a {type(rows[0]).__name__}: each row must be a dict of columns")
    return {name: _kind_of_value(value) for name, value in rows[0].items()}


def _kind_of_feature(feature: Any) -> str:
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


def find_columns(rows: Any, kind: str, source: DataSource) -> tuple[str, ...]:
    """The column of images, audio or texts (`kind`: "image", "audio", "text"); two where the source names text pairs."""
    kinds = column_kinds(rows)
    columns = {"image": source.image, "audio": source.audio, "text": source.text}
    other = next((column for name, column in columns.items() if name != kind and column is not None), None)
    if other is not None:
        raise ValueError(f"the column {other!r} does not go with a model of {PLURALS[kind]}: name it as {kind}=")
    named = source.text_columns if kind == "text" else tuple(filter(None, [columns[kind]]))
    if len(named) > 2:
        raise ValueError(f"text is {source.text!r}: name one column, or two of pairs")
    for name in named:
        _check_exists(name, kinds, source)
        if hasattr(rows, "features") and kinds[name] != kind and kinds[name].startswith(SCALARS):
            raise ValueError(
                f"the column {name!r} of {source.name} holds {PLURALS.get(kinds[name], kinds[name])}, not {PLURALS[kind]}: name "
                "another"
            )
    if named:
        return named
    matching = [name for name in kinds if kinds[name] == kind and name != source.label]
    if kind == "text":
        usual = [name for name in TEXT_NAMES if name in matching]
        others = [name for name in matching if name not in LABEL_NAMES]
        matching = usual[:1] or others or (matching if source.label is not None else [])
    return (_one_of(matching, kind, kinds, source),)


def find_label_column(rows: Any, source: DataSource, num_labels: int | None) -> str:
    """The column of classes, or of lists of them; of several (coarse and fine labels) the one with as many classes as the
    model."""
    kinds = column_kinds(rows)
    if source.label is not None:
        _check_exists(source.label, kinds, source)
        return source.label
    classes = [name for name in kinds if kinds[name] == "class"] or [
        name for name in kinds if kinds[name] == "classes"
    ]
    fitting = [name for name in classes if num_classes(rows, name) == num_labels]
    usual = [name for name in LABEL_NAMES if name in kinds]
    matching = fitting if len(fitting) == 1 else classes if len(classes) == 1 else usual[:1] or classes
    return _one_of(matching, "label", kinds, source)


def num_classes(rows: Any, column: str) -> int | None:
    feature = rows.features[column] if getattr(rows, "features", None) else None
    return getattr(getattr(feature, "feature", None) or feature, "num_classes", None)


# Words and their tags, of classifiers of tokens


def has_words(rows: Any, source: DataSource) -> bool:
    """Whether the rows are lists of words with tags, and not texts."""
    kinds = column_kinds(rows)
    if source.text_columns:
        return [kinds.get(name) for name in source.text_columns] == ["words"]
    has_text = any(kind == "text" and name not in (*TAG_NAMES, "id", "lang") for name, kind in kinds.items())
    return not has_text and any(kinds.get(name) == "words" for name in WORD_NAMES)


def find_word_column(rows: Any, source: DataSource) -> str:
    """The column of lists of words."""
    kinds = column_kinds(rows)
    for name in source.text_columns:
        _check_exists(name, kinds, source)
        if kinds[name] != "words" or len(source.text_columns) > 1:
            raise ValueError(
                f"the column {name!r} of {source.name} does not hold lists of words, or is one of several, and a classifier of "
                "tokens reads one column of words: name it as text= (--text-column)"
            )
        return name
    usual = [name for name in WORD_NAMES if kinds.get(name) == "words"]
    words = [name for name, kind in kinds.items() if kind == "words" and name not in TAG_NAMES]
    return _one_of(usual[:1] or words, "text", kinds, source, "column of words")


def find_tag_column(rows: Any, source: DataSource, words: str, num_labels: int | None) -> str:
    """The column of lists of tags; of several (POS and NER) the one with as many tags as the model has classes."""
    kinds = column_kinds(rows)
    lists = [name for name, kind in kinds.items() if kind in ("words", "classes", "numbers") and name != words]
    if source.label is not None:
        _check_exists(source.label, kinds, source)
        lists = [name for name in lists if name == source.label]
    fitting = [name for name in lists if num_labels is not None and num_classes(rows, name) == num_labels]
    usual = [name for name in TAG_NAMES if name in lists]
    return _one_of(fitting if len(fitting) == 1 else usual[:1] or lists, "label", kinds, source, "column of tags")


def _check_exists(column: str, kinds: Mapping[str, str], source: DataSource) -> None:
    if column not in kinds:
        raise ValueError(f"{source.name} has no column {column!r}: it has {', '.join(kinds)}")


def _one_of(
    matching: Sequence[str], kind: str, kinds: Mapping[str, str], source: DataSource, title: str | None = None
) -> str:
    if len(matching) == 1:
        return matching[0]
    pairs = ", or two of pairs as FIRST,SECOND" if kind == "text" and matching else ""
    raise ValueError(
        f"{source.name} has {'more than one' if matching else 'no'} {title or f'{kind} column'} among {', '.join(kinds)}: name it "
        f"as {kind}= (--{kind}-column){pairs}"
    )


def without_missing_columns(source: DataSource, rows: Any) -> DataSource:
    """Forgets column names that this set does not have: they were named for the labelled data."""
    kinds, columns = column_kinds(rows), source.text_columns
    are_missing = any(column not in kinds for column in columns)
    if are_missing and len(columns) == 2:  # single texts would differ from pairs by their form alone
        raise ValueError(
            f"{source.name} has no columns {' and '.join(map(repr, columns))}, and is to be compared with pairs of texts: rename "
            f"two of its columns ({', '.join(kinds)})"
        )
    image, audio = (name if name in kinds else None for name in (source.image, source.audio))
    return replace(source, image=image, audio=audio, text=None if are_missing else source.text)


def check_none_is_missing(rows: Any, column: str, kind: str, source: DataSource) -> None:
    if not hasattr(rows, "features") or rows.data.column(column).null_count == 0:
        return
    if kind == "image":
        rows = rows.cast_column(column, type(rows.features[column])(decode=False))
    missing = [row for row, value in enumerate(rows[column]) if value is None]
    if missing:  # rows that a selection left out also count as null
        raise ValueError(
            f"{len(missing)} of {len(rows):,} rows of {source.name} have no {kind} in the column {column!r}, the first is row "
            f"{missing[0]}: fill or remove them"
        )
