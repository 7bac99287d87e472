"""Reads columns of several labels per row, as a 0 or 1 for each label of a model."""

import json
import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

from .labels import Labels, are_generic, match_names
from .rows import DataSource


SEPARATORS = ("|", ";", ",")  # in cells of csv files; the first that any cell has


def has_lists(rows: Any, column: str) -> bool:
    """Whether a column of labels holds a list in each row, in csv files as JSON or as "joy|surprise"."""
    value = rows[0][column]
    if not isinstance(value, (str, type(None))) or not hasattr(rows, "features"):
        return not isinstance(value, (str, bytes)) and hasattr(value, "__len__")
    cells = [cell for cell in rows[column] if isinstance(cell, str)]
    # Other separators may be part of a name: "tench, Tinca tinca".
    return any("|" in cell for cell in cells) or (bool(cells) and all(map(_is_list_in_json, cells)))


def _is_list_in_json(cell: str) -> bool:
    try:
        return isinstance(json.loads(cell.replace("'", '"')), list)
    except ValueError:
        return False


class LabelLists(Labels):
    """The column of labels of a data set whose rows have any number of them.

    A row names its labels in a list, by name or number, or has a 0 or 1 for every label. In csv files a cell is such a list
    in JSON, "[0, 3]", or names or numbers with one of `SEPARATORS` between them, "joy|surprise"; an empty one has no label.
    """

    def __init__(self, rows: Any, column: str, source: DataSource):
        super().__init__(rows, column, source)
        if self.values is None:
            return
        feature = rows.features[column] if hasattr(rows, "features") else None
        self.names = getattr(getattr(feature, "feature", None), "names", None)
        if self.are_texts:
            cells = [cell or "" for cell in self.values]
            separator = next((each for each in SEPARATORS if any(each in cell for cell in cells)), None)
            self.values = [self._cell(cell, separator, row) for row, cell in enumerate(cells)]
        self.values = [self._listed(value, row) for row, value in enumerate(self.values)]
        texts = {label for labels in self.values for label in labels if isinstance(label, str)}
        self.are_texts = bool(texts)
        if texts:
            self.names = sorted(texts)

    def _cell(self, cell: str, separator: str | None, row: int) -> list[Any]:
        """The labels that a cell of a csv file lists."""
        cell = cell.strip()
        if cell.startswith("["):
            try:
                return json.loads(cell.replace("'", '"'))
            except ValueError as error:
                raise ValueError(
                    f"row {row} of the column {self.column!r} of {self.source.name} is {cell[:40]!r}, which is no list in JSON: "
                    'write ["joy", "surprise"], or joy|surprise'
                ) from error
        parts = [part.strip() for part in (cell.split(separator) if separator else [cell]) if part.strip()]
        return [int(part) for part in parts] if all(part.isdecimal() for part in parts) else parts

    def _listed(self, value: Any, row: int) -> list[Any]:
        value = value.tolist() if hasattr(value, "tolist") else value
        if value is None:
            return []
        if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
            raise ValueError(
                f"row {row} of the column {self.column!r} of {self.source.name} is {repr(value)[:40]}: the model decides on "
                "several labels, give each row a list of its labels, [3], or a 0 or 1 for every label"
            )
        return list(value)

    def are_vectors(self, num_labels: int) -> bool:
        """Whether every row has a 0 or 1 for each label, not a list of its labels."""
        return not self.are_texts and all(
            len(labels) == num_labels and all(label in (0, 1) for label in labels) for labels in self.values
        )

    def classes(self) -> list[str]:
        """The data's own labels in the order of their numbers; LABEL_0, LABEL_1, ... where they have no names."""
        if self.names is not None:
            return list(self.names)
        widths = {len(labels) for labels in self.values}
        if len(widths) == 1 and self.are_vectors(count := widths.pop()):
            return [f"LABEL_{label}" for label in range(count)]
        numbers = [max(self._numbers(labels, row)) for row, labels in enumerate(self.values) if labels]
        if not numbers:
            raise ValueError(
                f"no row of {self.source.name} has a label in the column {self.column!r}: nothing to learn"
            )
        return [f"LABEL_{label}" for label in range(max(numbers) + 1)]

    def multi_hot(self, classes: Sequence[str]) -> tuple[list[list[float]], str]:
        """A 0. or 1. for each of the model's `classes`, row by row, and a note on how labels were matched."""
        count = len(classes)
        if self.are_vectors(count):
            vectors = [list(map(float, labels)) for labels in self.values]
            return vectors, f"a 0 or 1 for each of {count} labels, as they are"
        numbers, note = [self._numbers(labels, row) for row, labels in enumerate(self.values)], "label numbers"
        is_in_order = self.names is None or (not self.are_texts and self.source.labels_in_order)
        if not is_in_order and not self.are_texts and are_generic(classes):
            if len(self.names) != count:
                raise ValueError(
                    f"{self.source.name} has {len(self.names)} labels, the model {count}: they do not fit"
                )
            is_in_order, note = True, f"{count} labels taken in order (the model has no names for them)"
        if not is_in_order:
            present = {label for labels in numbers for label in labels}
            matched = match_names(self.names, list(classes), present, self.source.name)
            numbers = [[matched[label] for label in labels] for labels in numbers]
            note = f"{len(matched)} of the model's {count} labels, matched by name"
        for row, labels in enumerate(numbers):
            outside = next((label for label in labels if not 0 <= label < count), None)
            if outside is not None:
                raise ValueError(
                    f"row {row} of {self.source.name} has the label {outside}, the model has the labels 0 to {count - 1}"
                )
        rows = [set(labels) for labels in numbers]
        return [[float(label in labels) for label in range(count)] for labels in rows], note

    def _numbers(self, labels: list[Any], row: int) -> list[int]:
        if self.are_texts:
            places = {name: place for place, name in enumerate(self.names)}
            odd = next((label for label in labels if label not in places), None)
            if odd is not None:
                raise ValueError(
                    f"row {row} of {self.source.name} has the label {odd!r}, others have names: name all of them, or none"
                )
            return [places[label] for label in labels]
        for label in labels:
            if not isinstance(label, Real) or math.isnan(label) or label != int(label):
                raise ValueError(
                    f"row {row} of the column {self.column!r} of {self.source.name} has {label!r} among its labels: pass names "
                    "or whole numbers, or a 0 or 1 for every label"
                )
        return [int(label) for label in labels]
