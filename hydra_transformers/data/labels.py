"""Matches the labels of a data set with a model's classes, by name or by number.

A row has one label, several, or one for each word.
"""

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
        labels = self.values
        if self.are_lists:
            if self.cells is not None and source.label_separator is not None:
                self.values = self.cells
            self.values = [self._listed(value, row) for row, value in enumerate(self.values)]
            labels = chain.from_iterable(self.values)

        texts = {label for label in labels if isinstance(label, str)}
        self.are_texts = bool(texts) or (kind == "text" and not self.are_lists)
        self.are_bools = kind == "bool"
        self.names: list[str] | None = sorted(texts)
        if not texts:
            self.names = getattr(feature_of(rows, column), "names", None)
        self.places = _places_of(self.names or ())

    def _check_are_numbers_or_names(self) -> None:
        """Raise for a csv column of numbers and words for "nothing", which would become a class."""
        cells = {cell for cell in self.cells if cell is not None}
        others = {cell for cell in cells if cell and not _is_number(cell)}
        has_numbers = len(cells) > len(others)
        if has_numbers and others and {cell.lower() for cell in others} <= MISSING:
            raise ValueError(
                f"the column {self.column!r} of {self.source.name} has numbers and {sorted(others)[0]!r}: leave the "
                "cell empty or remove the row where there is no label"
            )

    def _take_cells_as_names(self) -> None:
        """Read numbers of a csv file as the names of classes."""
        self.values = self.cells
        self.are_texts = True
        self.names = sorted({cell for cell in self.cells if cell is not None})
        if all(name.lstrip("-").isdecimal() for name in self.names):
            self.names.sort(key=int)
        self.places = _places_of(self.names)

    def index(self, value: Any) -> int:
        """Return a label as the data's own class index; -1 where it is missing."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return -1
        if isinstance(value, str) and self.are_texts:
            return self.places[value]
        if getattr(value, "ndim", None) == 0:
            value = value.item()
        # 1.0 is the class 1: pandas and csv files turn whole numbers into floats where one is
        # missing.
        is_number = isinstance(value, Real) and not math.isinf(value)
        if self.are_texts or not is_number or value != int(value):
            raise ValueError(
                f"the column {self.column!r} of {self.source.name} holds {repr(value)[:40]}, which is not a class: "
                "labels are whole numbers, or all of them names; name their column as label= (--label)"
            )
        return int(value)

    def to_model(self, labels: Iterable[int], classes: Sequence[str]) -> dict[int, int]:
        """Return the model's class index for each of the data's that occur: by name, or the same
        where either has no names."""
        present = sorted(set(labels))
        if self._names_for(classes, present) is None:
            self._check_are_known(present, len(classes))
            return {label: label for label in present}

        self._check_are_known(present, len(self.names))
        counts = Counter(classes)
        places = _places_of(classes)
        for label in present:
            name = self.names[label]
            if counts[name] != 1:
                self._raise_for_class(name, classes, is_known=counts[name] > 0)
        return {label: places[self.names[label]] for label in present}

    def _names_for(self, classes: Sequence[str], present: Sequence[int]) -> list[str] | None:
        """Return the names to match with the model's; None where either has none."""
        if self.names is None:
            self._check_are_not_names(present, classes)
            return None
        has_generic_names = all(map(GENERIC_NAME.fullmatch, classes))
        if self.are_texts or not has_generic_names:
            return self.names
        if len(self.names) != len(classes):
            raise ValueError(
                f"{self.source.name} has {len(self.names)} classes, the model {len(classes)}: they do not fit"
            )
        return None

    def _check_are_known(self, present: Sequence[int], known: int) -> None:
        """Raise for labels that are no index of a class."""
        for label in present:
            if not 0 <= label < known:
                raise ValueError(f"{self.source.name} has the label {label}, the classes are 0 to {known - 1}")

    def _raise_for_class(self, name: str, classes: Sequence[str], is_known: bool) -> None:
        """Raise for a class of the data that the model does not have, or has several times."""
        known = ", ".join(classes[:5])
        if len(classes) > 5:
            known += ", ..."
        fault = "which the model does not know"
        if is_known:
            fault = "which the model has several times"
        raise ValueError(
            f"{self.source.name} has the class {name!r}, {fault} (it knows {known}): rename or filter it, set "
            "id2label in the model's config, pass class indices, or labelled=False for out-of-distribution data"
        )

    def _check_are_not_names(self, present: Sequence[int], classes: Sequence[str]) -> None:
        """Raise for bare numbers, or True and False, that may as well be the names of other classes
        of the model."""
        places = _places_of([name.lower() for name in classes])
        texts = [str(bool(label) if self.are_bools else label) for label in present]
        named = [places.get(text.lower()) for text in texts]
        if None in named:
            return
        for label, text, place in zip(present, texts, named, strict=True):
            if place != label:
                raise ValueError(
                    f"the label {text} of {self.source.name} may be a number, or the name of the model's class "
                    f"{place}: give labels as texts, the names of their classes"
                )

    def indices(self) -> list[int]:
        """Return the data's own class indices of all rows."""
        labels = list(map(self.index, self.values))
        if -1 in labels:
            raise ValueError(
                f"{self.source.name} has {labels.count(-1)} rows without a label (-1, or an empty cell): "
                "remove them, or choose another split"
            )
        return labels

    def matched(self, classes: Sequence[str]) -> list[Any]:
        """Return the labels as indices of the model's `classes`."""
        if self.cells is not None and not self.are_texts and set(self.cells) - {None} <= set(classes):
            self._take_cells_as_names()
        labels = self.indices()
        places = self.to_model(labels, classes)
        return [places[label] for label in labels]

    def classes(self) -> list[str]:
        """Return the data's own classes in the order of their indices; LABEL_0, LABEL_1, ... where
        they have no names."""
        if self.names:
            return self.names
        labels = self.indices()
        lowest = min(labels)
        highest = max(labels)
        count = len(set(labels))
        is_sparse = count < (highest + 1) / 10
        has_gaps = count < highest + 1
        if self.cells is not None and (self.are_bools or has_gaps):
            self._take_cells_as_names()
            return self.names
        if is_sparse:
            raise ValueError(
                f"column {self.column!r} has {count} labels, up to {highest}: numbers are class indices, give codes "
                "as texts"
            )
        if lowest > 0:  # a class without rows would be added
            raise ValueError(
                f"column {self.column!r} has the labels {lowest} to {highest}, and numbers count classes from 0: give "
                'them as texts, "1", count from 0, or predict them as numbers, regression=True (--regression)'
            )
        return [f"LABEL_{index}" for index in range(highest + 1)]

    def are_numbers(self) -> bool:
        """Whether the labels are numbers for regression: some are not whole."""
        numbers = [value for value in self.values if isinstance(value, float) and math.isfinite(value)]
        return not self.are_texts and any(value != int(value) for value in numbers)

    def numbers(self, outputs: int) -> list[Any]:
        """Return the labels as floats for regression: one for each row, or a list of so many."""
        numbers: list[Any] = []
        for row, value in enumerate(self.values):
            is_list = isinstance(value, (list, tuple)) or bool(getattr(value, "ndim", 0))
            parts = value if is_list else [value]
            if len(parts) != outputs or not all(isinstance(part, Real) and math.isfinite(part) for part in parts):
                form = "a number" if outputs == 1 else f"a list of {outputs} numbers"
                raise ValueError(
                    f"row {row} of {self.source.name} has {repr(value)[:40]} in the column {self.column!r}, and the "
                    f"model is made for regression: give every row {form}, or name another column as label= (--label)"
                )
            if is_list:
                numbers.append(list(map(float, parts)))
            else:
                numbers.append(float(value))
        return numbers


class LabelLists(Labels):
    """The column of labels of a data set whose rows have any number of them.

    A row names its labels in a list, by name or number, or has a 0 or 1 for every label. In a cell
    of text, labels stand between the separator that the source names; an empty cell has none. Tags
    of words are lists, too, -100 where a word has none.
    """

    are_lists = True

    def _listed(self, value: Any, row: int) -> list[Any]:
        """Return the labels of a row as they stand in it."""
        separator = self.source.label_separator
        if isinstance(value, str) and separator is not None:
            parts = [label.strip() for label in value.split(separator)]
            labels = [label for label in parts if label]
            if all(label.isdecimal() for label in labels):
                return list(map(int, labels))
            return labels
        if value is None:
            return []
        if hasattr(value, "tolist"):
            value = value.tolist()
        if not isinstance(value, (list, tuple)):
            raise ValueError(
                f"row {row} of the column {self.column!r} of {self.source.name} is {repr(value)[:40]}: give each row "
                "a list of "
                'labels, [3], or a 0 or 1 for every label, or name what stands between them, label_separator="|"'
            )
        return list(value)

    def are_vectors(self, num_labels: int) -> bool:
        """Whether every row has a 0 or 1 for each label, not a list of its labels."""
        if self.are_texts or any(len(labels) != num_labels for labels in self.values):
            return False
        return all(label in (0, 1) for label in chain.from_iterable(self.values))

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
        """Return a 0. or 1. for each of the model's `classes`, row by row."""
        if self.are_vectors(len(classes)):
            return [list(map(float, labels)) for labels in self.values]
        lists = self.indices()
        places = self.to_model(chain.from_iterable(lists), classes)
        vectors = []
        for labels in lists:
            chosen = {places[label] for label in labels}
            vectors.append([float(place in chosen) for place in range(len(classes))])
        return vectors

    def of_words(self, words: Sequence[Sequence[str]], classes: Sequence[str]) -> list[list[int]]:
        """Return the class of each word as the model counts them."""
        for row, (texts, tags) in enumerate(zip(words, self.values, strict=True)):
            if len(texts) != len(tags):
                raise ValueError(
                    f"row {row} of {self.source.name} has {len(texts)} words and {len(tags)} tags: give every word one"
                )
        lists = self.indices()
        tagged = [tag for tag in chain.from_iterable(lists) if tag != NO_TAG]
        places = self.to_model(tagged, classes)
        return [[places.get(tag, NO_TAG) for tag in tags] for tags in lists]


def has_lists(rows: Any, column: str, source: DataSource) -> bool:
    """Whether a column of labels holds several in each row: lists, or cells with the separator that
    the source names."""
    if source.label_separator is not None:
        return True
    value = rows[0][column]
    return hasattr(value, "__len__") and not isinstance(value, str)


def _is_number(cell: str) -> bool:
    """Whether a cell is written as a number, and is no word for "nothing"."""
    return cell.lower() not in MISSING and NUMBER.fullmatch(cell) is not None


def _places_of(names: Sequence[str]) -> dict[str, int]:
    """Return the place of each name."""
    return {name: place for place, name in enumerate(names)}
