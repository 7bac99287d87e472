"""Reads the groups of rows: values of a column that is known when predicting, such as a site."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ..models.decision_settings import name_of_group
from .batches import ChangedBatches
from .loading import PreparedData
from .rows import as_rows


MOST_SHARE = 0.5  # of rows that have a value of their own: a column with more is no column of groups


def groups_of(data: Any, column: str) -> list[str]:
    """Return the group of each row, by its name.

    Args:
        data (`PreparedData`, `Dataset`, `DataFrame` or `list[dict]`): rows, or dict batches, with
            the column.
        column (`str`): whose values name the groups.

    Example:
        >>> groups_of([{"text": "a", "site": "north"}, {"text": "b", "site": 3.0}], "site")
        ['north', '3']
    """
    if isinstance(data, ChangedBatches):
        data = data.data
    if isinstance(data, DataLoader):
        raise TypeError(
            f"data is a DataLoader, which drops the column {column!r} and may shuffle: pass rows, or a list of batches"
        )
    cells = _cells_of(data, column)
    return [group_name(cell, f"row {row} of the data", column) for row, cell in enumerate(cells)]


def check_are_groups(groups: Sequence[str], column: str) -> None:
    """Raise for a column with a value of its own in many rows, such as a number of the row."""
    count = len(set(groups))
    if count > max(2, MOST_SHARE * len(groups)):
        raise ValueError(
            f"the column {column!r} has {count:,} values in {len(groups):,} rows: pass a column of groups "
            "with many rows each"
        )


def group_name(cell: Any, row: str, column: str) -> str:
    """Return a cell's value as the name of a group: the number 3 has the same name as 3.0.

    Args:
        cell: of the column.
        row (`str`), column (`str`): where it is, for errors.
    """
    if isinstance(cell, (np.generic, np.ndarray, Tensor)):
        cell = cell.item()
    if cell is None or cell == "" or (isinstance(cell, float) and math.isnan(cell)):
        raise ValueError(f"{row} has nothing in the column {column!r}: fill it in, every row is of a group")
    return name_of_group(cell)


def _cells_of(data: Any, column: str) -> list[Any]:
    """Return the column's cell of each row."""
    rows = as_rows(data.rows if isinstance(data, PreparedData) else data)
    if hasattr(rows, "column_names") and hasattr(rows, "features"):  # of `datasets`
        _check_has(column, rows.column_names)
        names = getattr(rows.features[column], "names", None)
        cells = list(rows[column])
        if names is None:
            return cells
        return [None if cell is None else names[cell] for cell in cells]
    cells: list[Any] = []
    for place in range(len(rows)):
        row = rows[place]
        if not isinstance(row, Mapping):
            raise TypeError(
                f"data holds a {type(row).__name__} in place of rows with the column {column!r}: pass dict rows"
            )
        _check_has(column, row)
        cell = row[column]
        is_batch = isinstance(cell, (list, tuple)) or (isinstance(cell, (np.ndarray, torch.Tensor)) and cell.ndim > 0)
        cells += list(cell) if is_batch else [cell]
    return cells


def _check_has(column: str, columns: Any) -> None:
    if column not in columns:
        names = ", ".join(map(str, list(columns)[:20]))
        raise ValueError(f"data has no column {column!r}, by which promises are made: it has {names}")
