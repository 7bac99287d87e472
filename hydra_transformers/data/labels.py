"""Matches the labels of a data set with a model's classes: by name, in any order and spelling, or by number."""

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

from transformers import PreTrainedConfig

from .columns import column_kinds
from .rows import DataSource


GENERIC_NAME = re.compile(r"LABEL_\d+")


def model_classes(config: PreTrainedConfig) -> list[str]:
    return [str(config.id2label[index]) for index in range(config.num_labels)]


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
        kind = column_kinds(rows)[column]
        self.are_texts = kind == "text"
        texts = {value for value in self.values or () if isinstance(value, str)}
        self.names: list[str] | None = rows.features[column].names if kind == "class" else sorted(texts) or None

    def indices(self) -> list[int]:
        """The data's own class indices; -1 where a label is missing."""
        if self.are_texts:
            places = {name: place for place, name in enumerate(self.names or ())}
            return [places.get(value, -1) for value in self.values]
        return list(map(self._index, self.values))

    def _index(self, value: Any) -> int:
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return -1
        value = value.item() if getattr(value, "ndim", None) == 0 else value
        # 1.0 is the class 1: pandas and csv files turn whole numbers into floats where one is missing.
        if not isinstance(value, Real) or math.isinf(value) or value != int(value):
            raise ValueError(
                f"the column {self.column!r} of {self.source.name} holds {repr(value)[:40]}, which is no class: labels are "
                "whole numbers or names, name their column as label= (--label-column)"
            )
        return int(value)

    def are_numbers(self) -> bool:
        """Whether the labels are numbers for regression: some are no whole number."""
        numbers = [value for value in self.values or () if isinstance(value, float) and math.isfinite(value)]
        return not self.are_texts and any(value != int(value) for value in numbers)

    def numbers(self, outputs: int) -> list[Any]:
        """The labels as numbers for regression: one for each row, or a list of so many."""
        wanted = "a number" if outputs == 1 else f"a list of {outputs} numbers"
        for row, value in enumerate(self.values):
            each = value if isinstance(value, (list, tuple)) or getattr(value, "ndim", 0) else [value]
            if len(each) != outputs or not all(isinstance(one, Real) and math.isfinite(one) for one in each):
                raise ValueError(
                    f"row {row} of {self.source.name} has {repr(value)[:40]} in the column {self.column!r}, and the model is made for "
                    f"regression: give every row {wanted}, or name another column as label= (--label-column)"
                )
        return self.values

    def matched(self, classes: list[str]) -> tuple[list[int], str]:
        """The labels as indices of the model's `classes`, and a note on how they were matched."""
        labels, names, source = self.indices(), self.names, self.source
        note = "class indices taken as they are"
        if names is not None and source.labels_in_order:
            if self.are_texts and len(names) != len(classes):
                raise ValueError(
                    f"column {self.column!r} of {source.name} holds {len(names)} names, the model has {len(classes)} classes: "
                    "names can be taken in order only if all are there, make the column class indices"
                )
            note = "class names taken in order" if self.are_texts else note
        elif names is not None and not self.are_texts and are_generic(classes):
            if len(names) != len(classes):
                raise ValueError(f"{source.name} has {len(names)} classes, the model {len(classes)}: they do not fit")
            note = f"{len(names)} classes taken in order (the model has no names for them)"
        elif names is not None:
            matched = match_names(names, classes, {label for label in labels if label >= 0}, source.name)
            labels = [label if label < 0 else matched[label] for label in labels]
            note = f"{len(matched)} of the model's {len(classes)} classes, matched by name"
            moved = next((place for place, target in matched.items() if target != place), None)
            if moved is not None:
                note += f" ({names[moved]!r} is {moved} in the data, {matched[moved]} in the model)"
        return self.checked(labels, len(classes)), note

    def checked(self, labels: list[int], num_classes: int) -> list[int]:
        missing = labels.count(-1)
        if missing:
            raise ValueError(
                f"{self.source.name} has {missing} rows without a label (-1, or an empty cell, as which csv files also count "
                "NA and None): remove them, or choose another split"
            )
        outside = next((label for label in labels if not 0 <= label < num_classes), None)
        if outside is not None:
            raise ValueError(
                f"{self.source.name} has the label {outside}, the model has the classes 0 to {num_classes - 1}"
            )
        return labels


def match_names(names: list[str], classes: list[str], present: set[int], data_name: str) -> dict[int, int]:
    """Maps each present index of `names` to its place among the model's classes; refuses ambiguous names."""
    candidates = _candidates(names, classes)
    if are_generic(classes) and not all(candidates[label] for label in present):
        raise ValueError(
            f"the labels of {data_name} are names, and the model has no names for its {len(classes)} classes: set id2label in "
            "its config, or make the labels class indices"
        )
    in_order = "pass labels_in_order=True (--labels-in-order) if"
    for label in sorted(present):
        name, places = names[label], candidates[label]
        if not places:
            known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise ValueError(
                f"{data_name} has the class {name!r}, which the model does not know (it knows {known}): filter the data, or "
                f"{in_order} only the names differ, or labelled=False for data from elsewhere"
            )
        first = f"{places[0]} ({classes[places[0]]!r})"
        if len(places) > 1:
            raise ValueError(
                f"{data_name} has the class {name!r}, which may be the model's {first} or {places[1]} "
                f"({classes[places[1]]!r}): rename it in the data, or {in_order} data and model count their classes alike"
            )
        others = [names[other] for other, found in enumerate(candidates) if other != label and found == places]
        if others:
            raise ValueError(
                f"{data_name} has the classes {name!r} and {others[0]!r}, and both may be the model's {first}: rename or "
                f"filter them, or {in_order} data and model count their classes alike"
            )
    return {label: candidates[label][0] for label in sorted(present)}


def are_generic(classes: Sequence[str]) -> bool:
    return all(map(GENERIC_NAME.fullmatch, classes))


def _candidates(names: list[str], classes: list[str]) -> list[list[int]]:
    """For each name the classes that it may mean: of exactly this name, else in another spelling, else with a synonym in
    common."""
    found: list[list[int]] = [[] for _ in names]
    for keys in (lambda name: [name], lambda name: _spellings(name)[:1], _spellings):
        places: dict[str, list[int]] = {}
        for place, name in enumerate(classes):
            for key in keys(name):
                places.setdefault(key, []).append(place)
        for index, name in enumerate(names):
            if not found[index]:
                found[index] = sorted({place for key in keys(name) for place in places.get(key, ())})
    return found


def _spellings(name: str) -> list[str]:
    """A class name in plain spelling: the whole of it, and each of its synonyms ("tench, Tinca tinca")."""
    plain = " ".join(re.sub(r"[_\-\s]+", " ", name.casefold()).split())
    return list(dict.fromkeys([plain, *(part.strip() for part in plain.split(","))]))
