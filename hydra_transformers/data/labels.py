"""Matches the labels of a data set with a model's classes, by name or by number: one for a row, several, or one for a word."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from numbers import Real
from typing import Any

from transformers import PreTrainedConfig

from .columns import DataSource, column_kinds


NO_TAG = -100  # of tokens that no loss and no metric counts
GENERIC_NAME = re.compile(r"LABEL_\d+")


def model_classes(config: PreTrainedConfig) -> list[str]:
    return [str(config.id2label[index]) for index in range(config.num_labels)]


def are_generic(classes: Sequence[str]) -> bool:
    return all(map(GENERIC_NAME.fullmatch, classes))


def match_names(names: Sequence[str], classes: Sequence[str], present: set[int], data_name: str) -> dict[int, int]:
    """Maps each present index of `names` to the place of the same name among the model's classes."""
    counts, places = Counter(classes), {name: place for place, name in enumerate(classes)}
    for label in sorted(present):
        if counts[names[label]] != 1:
            known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            fault = "which the model has several times" if counts[names[label]] else "which the model does not know"
            raise ValueError(
                f"{data_name} has the class {names[label]!r}, {fault} (it knows {known}): rename or filter it, set id2label in the "
                "model's config, pass class indices, or labelled=False for out-of-distribution data"
            )
    return {label: places[names[label]] for label in sorted(present)}


class Labels:
    """The column of labels of a data set.

    values: of all rows; None for a Dataset that can only be read row by row
    names: of the classes, in the order of their indices; None for a column of bare numbers
    are_texts: whether the values are names
    """

    def __init__(self, rows: Any, column: str, source: DataSource):
        self.column, self.source, self.values = column, source, None
        if hasattr(rows, "features"):
            self.values = list(rows[column])
        elif isinstance(rows, (list, tuple)):
            self.values = [row.get(column) for row in rows]
        feature = rows.features[column] if getattr(rows, "features", None) else None
        self.names: list[str] | None = getattr(getattr(feature, "feature", None) or feature, "names", None)
        self.are_texts = column_kinds(rows)[column] == "text"
        self.take_names(self.values or ())

    def take_names(self, values: Sequence[Any]) -> None:
        texts = {value for value in values if isinstance(value, str)}
        self.are_texts = self.are_texts or bool(texts)
        self.names = sorted(texts) if texts else self.names
        self.places = {name: place for place, name in enumerate(self.names or ())}

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

    def to_model(self, labels: Sequence[int], classes: Sequence[str]) -> tuple[dict[int, int], str]:
        """The model's class index for each of the data's, and a note on how they were matched.

        labels: the data's class indices that occur
        """
        present, names, count = set(labels), self.names, len(classes)
        in_order, note = names is None, "class indices taken as they are"
        if names is not None and are_generic(classes) and not self.are_texts:
            if len(names) != count:
                raise ValueError(f"{self.source.name} has {len(names)} classes, the model {count}: they do not fit")
            in_order, note = True, f"{count} classes taken in order"
        known = count if in_order else len(names)
        outside = next((label for label in sorted(present) if not 0 <= label < known), None)
        if outside is not None:
            raise ValueError(f"{self.source.name} has the label {outside}, the classes are 0 to {known - 1}")
        if in_order:
            return {label: label for label in present}, note
        matched = match_names(names, classes, present, self.source.name)
        return matched, f"{len(matched)} of the model's {count} classes, matched by name"

    def indices(self) -> list[int]:
        """The data's own class indices of all rows."""
        labels = list(map(self.index, self.values))
        if -1 in labels:
            raise ValueError(
                f"{self.source.name} has {labels.count(-1)} rows without a label (-1, or an empty cell, as which csv files also "
                "count NA and None): remove them, or choose another split"
            )
        return labels

    def matched(self, classes: Sequence[str]) -> tuple[list[Any], str]:
        """The labels as indices of the model's `classes`, and a note on how they were matched."""
        labels = self.indices()
        places, note = self.to_model(labels, classes)
        return [places[label] for label in labels], note

    def are_numbers(self) -> bool:
        """Whether the labels are numbers for regression: some are not whole."""
        numbers = [value for value in self.values or () if isinstance(value, float) and math.isfinite(value)]
        return not self.are_texts and any(value != int(value) for value in numbers)

    def numbers(self, outputs: int) -> list[Any]:
        """The labels as numbers for regression: one for each row, or a list of so many."""
        wanted = "a number" if outputs == 1 else f"a list of {outputs} numbers"
        for row, value in enumerate(self.values):
            parts = value if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) else [value]
            if len(parts) != outputs or not all(isinstance(part, Real) and math.isfinite(part) for part in parts):
                raise ValueError(
                    f"row {row} of {self.source.name} has {repr(value)[:40]} in the column {self.column!r}, and the model is made "
                    f"for regression: give every row {wanted}, or name another column as label= (--label)"
                )
        return self.values


class LabelLists(Labels):
    """The column of labels of a data set whose rows have any number of them.

    A row names its labels in a list, by name or number, or has a 0 or 1 for every label. In a cell of text, labels stand between
    the separator that the source names; an empty cell has none.
    """

    def __init__(self, rows: Any, column: str, source: DataSource):
        super().__init__(rows, column, source)
        if self.values is None:
            return
        if self.are_texts and source.label_separator is not None:
            self.values = list(map(self._split, self.values))
        self.are_texts, self.names = False, None if self.are_texts else self.names
        self.values = [self._listed(value, row) for row, value in enumerate(self.values)]
        self.take_names([label for labels in self.values for label in labels])

    def _split(self, cell: str | None) -> list[Any]:
        labels = [label.strip() for label in (cell or "").split(self.source.label_separator) if label.strip()]
        return list(map(int, labels)) if all(label.isdecimal() for label in labels) else labels

    def _listed(self, value: Any, row: int) -> list[Any]:
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

    def list_indices(self) -> list[list[int]]:
        return [[self.index(label) for label in labels] for labels in self.values]

    def classes(self) -> list[str]:
        """The data's own labels in the order of their numbers; LABEL_0, LABEL_1, ... where they have no names."""
        if self.names is not None:
            return list(self.names)
        widths = {len(labels) for labels in self.values}
        if len(widths) == 1 and self.are_vectors(min(widths)):
            return [f"LABEL_{label}" for label in range(min(widths))]
        count = 1 + max((label for labels in self.list_indices() for label in labels), default=-1)
        return [f"LABEL_{label}" for label in range(count)]

    def multi_hot(self, classes: Sequence[str]) -> tuple[list[list[float]], str]:
        """A 0. or 1. for each of the model's `classes`, row by row, and a note on how labels were matched."""
        count = len(classes)
        if self.are_vectors(count):
            vectors = [list(map(float, labels)) for labels in self.values]
            return vectors, f"a 0 or 1 for each of {count} labels, as they are"
        lists = self.list_indices()
        places, note = self.to_model([label for labels in lists for label in labels], classes)
        rows = [{places[label] for label in labels} for labels in lists]
        return [[float(label in labels) for label in range(count)] for labels in rows], note


class Tags(LabelLists):
    """The column of tags of a data set: a name or number for each word, -100 where a word has none."""

    def are_vectors(self, num_labels: int) -> bool:
        return False

    def of_words(self, words: Sequence[Sequence[str]], classes: Sequence[str]) -> tuple[list[list[int]], str]:
        """The class of each word as the model counts them, and a note on how tags were matched."""
        for row, (texts, tags) in enumerate(zip(words, self.values, strict=True)):
            if len(texts) != len(tags):
                raise ValueError(
                    f"row {row} of {self.source.name} has {len(texts)} words and {len(tags)} tags: give every word one"
                )
        lists = self.list_indices()
        present = {tag for tags in lists for tag in tags if tag != NO_TAG}
        places, note = self.to_model(sorted(present), classes)
        return [[places.get(tag, NO_TAG) for tag in tags] for tags in lists], note


def has_lists(rows: Any, column: str, source: DataSource) -> bool:
    """Whether a column of labels holds several in each row: lists, or cells with the separator that the source names."""
    value = rows[0][column]
    return source.label_separator is not None or (not isinstance(value, str) and hasattr(value, "__len__"))
