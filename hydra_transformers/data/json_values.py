"""Puts values of JSON files back as they were written.

Those are dates, which are read as times, whole numbers of many digits, and values of several types
in one column.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .tables import TableError


MOST_EXACT = 2**53  # whole numbers above are not exact as floats


def restore_values(rows: Any, files: Sequence[str]) -> Any:
    """Return rows of JSON files with their dates, and whole numbers of many digits, as texts.

    Columns of several types are of texts of JSON, which their feature decodes.

    Args:
        rows (`Dataset`): As `datasets` has read them.
        files (`Sequence[str]`): The files that the rows are of, in their order.
    """
    mixed = mixed_columns(rows)
    changed = [name for name in rows.column_names if name in mixed or _is_changed(rows.data.column(name))]
    if not changed:
        return rows
    try:
        written = _read_columns(files, changed)
        arrays = {}
        for name, values in written.items():
            arrays[name] = _as_json(values) if name in mixed else _as_array(values)
        is_whole = all(len(values) == len(rows) for values in written.values())
    except (ValueError, TypeError, AttributeError, OSError, KeyError):
        is_whole = False
    if not is_whole:
        raise TableError(
            f"the column {changed[0]!r} of {files[0]} has dates, long numbers or values of several types, which would "
            "be changed: write them as texts in a file of one JSON object per line"
        )
    import datasets

    # In place of what `datasets` has read, in the same order of columns
    order = rows.column_names
    for name, array in arrays.items():
        feature = {}
        if name in mixed:
            feature["feature"] = datasets.Json()  # earlier versions of `datasets` have none
        # Add before removing: without any column a table has no rows.
        unused = _unused_name(name, order)
        rows = rows.add_column(unused, array, **feature)
        rows = rows.remove_columns(name).rename_column(unused, name)
    return rows.select_columns(order)


def _unused_name(name: str, names: Sequence[str]) -> str:
    """Return a name like this one that no column has."""
    number = 0
    while f"{name} {number}" in names:
        number += 1
    return f"{name} {number}"


def _read_columns(files: Sequence[str], names: Sequence[str]) -> dict[str, list[Any]]:
    """Return some columns of JSON files, as they are written there."""
    written = {name: [] for name in names}
    for file in files:
        for row in _rows_of(Path(file)):
            for name in names:
                written[name].append(row.get(name))
    return written


def mixed_columns(rows: Any) -> list[str]:
    """Return the columns of a JSON file with values of several types.

    `datasets` keeps each value as a text of JSON. It takes a text that is itself JSON, such as "1",
    for the value that it stands for.
    """
    features = getattr(rows, "features", None) or {}
    return [name for name, feature in features.items() if _has_json(feature)]


def _has_json(feature: Any) -> bool:
    """Whether a feature is of JSON, or has such a feature inside."""
    if isinstance(feature, dict):
        return any(map(_has_json, feature.values()))
    if type(feature).__name__ == "Json":
        return True
    inside = getattr(feature, "feature", None)
    return inside is not None and _has_json(inside)


def _as_json(values: Sequence[Any]) -> Any:
    """Return each value as a text of JSON."""
    import pyarrow

    texts = _as_texts(values, partial(json.dumps, ensure_ascii=False))
    return pyarrow.array(texts, pyarrow.string())


def _is_changed(column: Any) -> bool:
    """Whether a column has times, or floats that may be whole numbers of many digits."""
    import pyarrow
    from pyarrow import compute

    def has_times(kind: Any) -> bool:
        inside = [kind.field(place).type for place in range(kind.num_fields)]
        return pyarrow.types.is_temporal(kind) or any(map(has_times, inside))

    if pyarrow.types.is_floating(column.type):
        largest = compute.max(compute.abs(column)).as_py()
        return largest is not None and largest >= MOST_EXACT
    return has_times(column.type)


def _rows_of(file: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file: an array of objects, or an object on each line."""
    with file.open(encoding="utf-8-sig") as lines:
        first = next((line for line in lines if line.strip()), "")
    if first.lstrip().startswith("["):
        yield from json.loads(file.read_text(encoding="utf-8-sig"))
        return
    with file.open(encoding="utf-8-sig", newline="\n") as lines:
        for line in lines:
            if line.strip():
                yield json.loads(line)


def _as_array(values: Sequence[Any]) -> Any:
    """Return values as they were written; whole numbers as texts where one has too many digits."""
    import pyarrow

    known = [value for value in values if value is not None]
    if not all(isinstance(value, (int, float)) for value in known):
        return pyarrow.array(values)
    if all(isinstance(value, int) for value in known):
        return pyarrow.array(_as_texts(values, str), pyarrow.string())
    if any(isinstance(value, int) and abs(value) > MOST_EXACT for value in known):
        return pyarrow.array(_as_texts(values, json.dumps), pyarrow.string())
    return pyarrow.array(values, pyarrow.float64())


def _as_texts(values: Sequence[Any], write: Callable[[Any], str]) -> list[str | None]:
    """Return values as texts, None as it is."""
    return [None if value is None else write(value) for value in values]
