"""Matches the labels of a data set with a model's classes, by name or by number: one for a row, several, or one for a word."""

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from numbers import Real
from typing import Any

from .columns import DataSource, column_kinds, feature_of, values_of
from .tables import NUMBER, kind_of_cells


NO_TAG = -100  # of tokens that no loss and no metric counts
MISSING = {"na", "n/a", "nan", "null", "none", "-", "?"}  # among numbers, these name no class
GENERIC_NAME = re.compile(r"LABEL_\d+")


class Labels:
    """The column of labels of a data set.

    values: of all rows
    names: of the classes, in the order of their indices; None for a column of bare numbers
    are_texts: whether the values are names
    """

    are_lists = False

    def __init__(self, rows: Any, column: str, source: DataSource):
        self.column = column
        self.source = source
        kind = column_kinds(rows)[column]
        self.values = values_of(rows, column)
        # Cells of a csv file have no type: numbers are indices of classes, or their names.
        self.cells: list[Any] | None = None
        if kind_of_cells(feature_of(rows, column)) is not None:
            self.cells = list(rows[column])
            self._check_are_numbers_or_names()
        if self.are_lists:
            if self.cells is not None and source.label_separator is not None:
                self.values = self.cells
            self.values = [self._listed(value, row) for row, value in enumerate(self.values)]
        labels = chain.from_iterable(self.values) if self.are_lists else self.values
        texts = {label for label in labels if isinstance(label, str)}
        self.are_texts = bool(texts) or (kind == "text" and not self.are_lists)
        self.names: list[str] | None = sorted(texts) or getattr(feature_of(rows, column), "names", None)
        self.places = {name: place for place, name in enumerate(self.names or ())}
        self.are_bools = kind == "bool"

    def _check_are_numbers_or_names(self) -> None:
        """Raises for a csv column of numbers and words for "nothing", which would become a class."""
        others = {cell for cell in self.cells if cell and (cell.lower() in MISSING or not NUMBER.fullmatch(cell))}
        numbers = len(set(self.cells) - others - {None})
        if numbers and others and {cell.lower() for cell in others} <= MISSING:
            raise ValueError(
                f"the column {self.column!r} of {self.source.name} has numbers and {sorted(others)[0]!r}: leave the cell "
                "empty or remove the row where there is no label"
            )

    def _take_cells_as_names(self) -> None:
        """Reads numbers of a csv file as the names of classes."""
        self.values = self.cells
        self.are_texts = True
        names = {cell for cell in self.cells if cell is not None}
        are_whole = all(name.lstrip("-").isdecimal() for name in names)
        self.names = sorted(names, key=int) if are_whole else sorted(names)
        self.places = {name: place for place, name in enumerate(self.names)}

    def index(self, value: Any) -> int:
        """A label as the data's own class index; -1 where it is missing."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return -1
        if isinstance(value, str) and self.are_texts:
            return self.places[value]
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        # 1.0 is the class 1: pandas and csv files turn whole numbers into floats where one is missing.
        if not isinstance(value, Real) or math.isinf(value) or value != int(value) or self.are_texts:
            raise ValueError(
                f"the column {self.column!r} of {self.source.name} holds {repr(value)[:40]}, which is not a class: labels are "
                "whole numbers, or all of them names; name their column as label= (--label)"
            )
        return int(value)

    def to_model(self, labels: Iterable[int], classes: Sequence[str]) -> dict[int, int]:
        """The model's class index for each of the data's that occur: by name, or the same where either has no names."""
        present, names, count = sorted(set(labels)), self.names, len(classes)
        if names is not None and all(map(GENERIC_NAME.fullmatch, classes)) and not self.are_texts:
            if len(names) != count:
                raise ValueError(f"{self.source.name} has {len(names)} classes, the model {count}: they do not fit")
            names = None
        elif names is None:
            self._check_are_not_names(present, classes)
        known = count if names is None else len(names)
        outside = next((label for label in present if not 0 <= label < known), None)
        if outside is not None:
            raise ValueError(f"{self.source.name} has the label {outside}, the classes are 0 to {known - 1}")
        if names is None:
            return {label: label for label in present}
        counts, places = Counter(classes), {name: place for place, name in enumerate(classes)}
        for name in (names[label] for label in present):
            if counts[name] != 1:
                known = ", ".join(classes[:5]) + (", ..." if count > 5 else "")
                fault = "which the model has several times" if counts[name] else "which the model does not know"
                raise ValueError(
                    f"{self.source.name} has the class {name!r}, {fault} (it knows {known}): rename or filter it, set id2label in "
                    "the model's config, pass class indices, or labelled=False for out-of-distribution data"
                )
        return {label: places[names[label]] for label in present}

    def _check_are_not_names(self, present: Sequence[int], classes: Sequence[str]) -> None:
        """Raises for bare numbers, or True and False, that may as well be the names of other classes of the model."""
        places = {name.lower(): place for place, name in enumerate(classes)}
        texts = [str(bool(label) if self.are_bools else label) for label in present]
        named = [places.get(text.lower()) for text in texts]
        if None not in named and named != present:
            first = next(index for index, label in enumerate(present) if named[index] != label)
            raise ValueError(
                f"the label {texts[first]} of {self.source.name} may be a number, or the name of the model's class {named[first]}: "
                "give labels as texts, the names of their classes"
            )

    def indices(self) -> list[int]:
        """The data's own class indices of all rows."""
        labels = list(map(self.index, self.values))
        if -1 in labels:
            raise ValueError(
                f"{self.source.name} has {labels.count(-1)} rows without a label (-1, or an empty cell): "
                "remove them, or choose another split"
            )
        return labels

    def matched(self, classes: Sequence[str]) -> list[Any]:
        """The labels as indices of the model's `classes`."""
        if self.cells is not None and not self.are_texts and set(self.cells) - {None} <= set(classes):
            self._take_cells_as_names()
        labels = self.indices()
        places = self.to_model(labels, classes)
        return [places[label] for label in labels]

    def classes(self) -> list[str]:
        """The data's own classes in the order of their indices; LABEL_0, LABEL_1, ... where they have no names."""
        if self.names:
            return self.names
        labels = self.indices()
        is_sparse = len(set(labels)) < (max(labels) + 1) / 10
        if self.cells is not None and (self.are_bools or is_sparse or min(labels) > 0):
            self._take_cells_as_names()
            return self.names
        if is_sparse:
            found = f"{len(set(labels))} labels, up to {max(labels)}"
            raise ValueError(f"column {self.column!r} has {found}: numbers are class indices, give codes as texts")
        if min(labels) > 0:  # a class without rows would be added
            raise ValueError(
                f"column {self.column!r} has the labels {min(labels)} to {max(labels)}, and numbers count classes from 0: give "
                'them as texts, "1", count from 0, or predict them as numbers, regression=True (--regression)'
            )
        return [f"LABEL_{index}" for index in range(max(labels) + 1)]

    def are_numbers(self) -> bool:
        """Whether the labels are numbers for regression: some are not whole."""
        numbers = [value for value in self.values if isinstance(value, float) and math.isfinite(value)]
        return not self.are_texts and any(value != int(value) for value in numbers)

    def numbers(self, outputs: int) -> list[Any]:
        """The labels as floats for regression: one for each row, or a list of so many."""
        numbers: list[Any] = []
        form = "a number" if outputs == 1 else f"a list of {outputs} numbers"
        for row, value in enumerate(self.values):
            parts = value if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) else [value]
            if len(parts) != outputs or not all(isinstance(part, Real) and math.isfinite(part) for part in parts):
                raise ValueError(
                    f"row {row} of {self.source.name} has {repr(value)[:40]} in the column {self.column!r}, and the model is made "
                    f"for regression: give every row {form}, or name another column as label= (--label)"
                )
            numbers.append(list(map(float, parts)) if parts is value else float(value))
        return numbers


class LabelLists(Labels):
    """The column of labels of a data set whose rows have any number of them.

    A row names its labels in a list, by name or number, or has a 0 or 1 for every label. In a cell of text, labels stand between
    the separator that the source names; an empty cell has none. Tags of words are lists, too, -100 where a word has none.
    """

    are_lists = True

    def _listed(self, value: Any, row: int) -> list[Any]:
        if isinstance(value, str) and self.source.label_separator is not None:
            labels = [label.strip() for label in value.split(self.source.label_separator) if label.strip()]
            return list(map(int, labels)) if all(label.isdecimal() for label in labels) else labels
        value = value.tolist() if hasattr(value, "tolist") else [] if value is None else value
        if not isinstance(value, (list, tuple)):
            raise ValueError(
                f"row {row} of the column {self.column!r} of {self.source.name} is {repr(value)[:40]}: give each row a list of "
                'labels, [3], or a 0 or 1 for every label, or name what stands between them, label_separator="|"'
            )
        return list(value)

    def are_vectors(self, num_labels: int) -> bool:
        """Whether every row has a 0 or 1 for each label, not a list of its labels."""
        return not self.are_texts and all(
            len(labels) == num_labels and all(label in (0, 1) for label in labels) for labels in self.values
        )

    def indices(self) -> list[list[int]]:
        return [[self.index(label) for label in labels] for labels in self.values]

    def classes(self, are_tags: bool = False) -> list[str]:
        if self.names is not None:
            return list(self.names)
        count = max(map(len, self.values))
        if are_tags or not self.are_vectors(count):
            count = 1 + max(chain.from_iterable(self.indices()), default=-1)
        return [f"LABEL_{label}" for label in range(count)]

    def matched(self, classes: Sequence[str]) -> list[list[float]]:
        """A 0. or 1. for each of the model's `classes`, row by row."""
        if self.are_vectors(len(classes)):
            return [list(map(float, labels)) for labels in self.values]
        lists = self.indices()
        places = self.to_model(chain.from_iterable(lists), classes)
        rows = [{places[label] for label in labels} for labels in lists]
        return [[float(label in labels) for label in range(len(classes))] for labels in rows]

    def of_words(self, words: Sequence[Sequence[str]], classes: Sequence[str]) -> list[list[int]]:
        """The class of each word as the model counts them."""
        for row, (texts, tags) in enumerate(zip(words, self.values, strict=True)):
            if len(texts) != len(tags):
                raise ValueError(
                    f"row {row} of {self.source.name} has {len(texts)} words and {len(tags)} tags: give every word one"
                )
        lists = self.indices()
        places = self.to_model((tag for tags in lists for tag in tags if tag != NO_TAG), classes)
        return [[places.get(tag, NO_TAG) for tag in tags] for tags in lists]


def has_lists(rows: Any, column: str, source: DataSource) -> bool:
    """Whether a column of labels holds several in each row: lists, or cells with the separator that the source names."""
    value = rows[0][column]
    return source.label_separator is not None or (not isinstance(value, str) and hasattr(value, "__len__"))
