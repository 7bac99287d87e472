"""Matches the labels of data with a model's classes: by their names, whatever their order and spelling, or by number."""

import math
import re
from collections.abc import Sequence
from numbers import Real
from typing import Any

from transformers import PreTrainedConfig

from .columns import column_kinds
from .rows import DataSource


GENERIC_NAME = re.compile(r"LABEL_\d+")


def label_values(rows: Any, column: str) -> list[Any] | None:
    """The labels of all rows; None where they are to be had only with the rows, whose images would all be opened."""
    if hasattr(rows, "features"):
        return list(rows[column])
    return [row.get(column) for row in rows] if isinstance(rows, (list, tuple)) else None


def class_names_of(rows: Any, column: str, values: Sequence[Any] | None) -> list[str] | None:
    """The names of a column's classes in the order of their indices; None for a column of bare numbers."""
    if column_kinds(rows)[column] == "class":
        return list(rows.features[column].names)
    found = {value for value in values or () if isinstance(value, str)}
    return sorted(found) or None


def model_classes(config: PreTrainedConfig) -> list[str]:
    return [str(config.id2label[index]) for index in range(config.num_labels)]


def class_indices(
    values: Sequence[Any], names: list[str] | None, column: str, are_texts: bool, source: DataSource
) -> list[int]:
    """Labels as the data's own class indices: texts by their place in `names`, -1 for what is missing."""
    if are_texts:
        places = {name: place for place, name in enumerate(names or ())}
        return [places.get(value, -1) for value in values]
    return [_index(value, column, source) for value in values]


def _index(value: Any, column: str, source: DataSource) -> int:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return -1
    value = value.item() if getattr(value, "ndim", None) == 0 else value
    # 1.0 is the class 1: pandas and csv files make floats of a column of whole numbers in which one was missing.
    if not isinstance(value, Real) or math.isinf(value) or value != int(value):
        raise ValueError(
            f"the column {column!r} of {source.name} holds {repr(value)[:40]}, which is no class: labels are whole numbers or "
            "names, name their column as label= (--label-column)"
        )
    return int(value)


def match_labels(
    labels: list[int],
    names: list[str] | None,
    column: str,
    are_texts: bool,
    config: PreTrainedConfig,
    source: DataSource,
) -> tuple[list[int], str]:
    """The data's class indices as the model's, and a sentence on how they were matched."""
    classes = model_classes(config)
    if names is None:
        return labels, "class indices taken as they are"
    if source.labels_in_order:
        if are_texts and len(names) != len(classes):
            raise ValueError(
                f"column {column!r} of {source.name} holds {len(names)} names, the model has {len(classes)} classes: "
                "without all of them their order says nothing, make the column class indices"
            )
        return labels, "class indices taken as they are" if not are_texts else "class names taken in order"
    if all(map(GENERIC_NAME.fullmatch, classes)) and not are_texts:
        if len(names) != len(classes):
            raise ValueError(f"{source.name} has {len(names)} classes, the model {len(classes)}: they do not fit")
        return labels, f"{len(names)} classes taken in order (the model has no names for them)"
    matched = match_names(names, classes, {label for label in labels if label >= 0}, source.name)
    moved = [place for place, target in matched.items() if target != place]
    note = f"{len(matched)} of the model's {len(classes)} classes, matched by name"
    if moved:
        note += f" ({names[moved[0]]!r} is {moved[0]} in the data, {matched[moved[0]]} in the model)"
    return [label if label < 0 else matched[label] for label in labels], note


def match_names(names: list[str], classes: list[str], present: set[int], data_name: str) -> dict[int, int]:
    """For each name that is present its place among the model's classes; refuses what is not certain."""
    candidates = _candidates(names, classes)
    if all(map(GENERIC_NAME.fullmatch, classes)) and not all(candidates[label] for label in present):
        raise ValueError(
            f"the labels of {data_name} are names, and the model has no names for its {len(classes)} classes: set id2label in "
            "its config, or make the labels class indices"
        )
    for label in sorted(present):
        places = candidates[label]
        if not places:
            known = ", ".join(classes[:5]) + (", ..." if len(classes) > 5 else "")
            raise ValueError(
                f"{data_name} has the class {names[label]!r}, which the model does not know (it knows {known}): filter the "
                "data, or pass labels_in_order=True (--labels-in-order) if only the names differ, or labelled=False for data "
                "from elsewhere"
            )
        if len(places) > 1:
            raise ValueError(
                f"{data_name} has the class {names[label]!r}, which may be the model's {places[0]} "
                f"({classes[places[0]]!r}) or {places[1]} ({classes[places[1]]!r}): rename it in the data, or pass "
                "labels_in_order=True (--labels-in-order) if data and model count their classes alike"
            )
        others = [names[other] for other, found in enumerate(candidates) if other != label and found == places]
        if others:
            raise ValueError(
                f"{data_name} has the classes {names[label]!r} and {others[0]!r}, and both may be the model's "
                f"{places[0]} ({classes[places[0]]!r}): rename or filter them, or pass labels_in_order=True "
                "(--labels-in-order) if data and model count their classes alike"
            )
    return {label: candidates[label][0] for label in sorted(present)}


def _candidates(names: list[str], classes: list[str]) -> list[list[int]]:
    """For each name the model's classes that it may mean: those of exactly this name; if there are none, those that are
    it in another spelling; and if there are none of these either, those that have a synonym in common with it."""
    found: list[list[int]] = [[] for _ in names]
    for keys in (lambda name: [name], lambda name: _keys(name)[:1], _keys):
        places: dict[str, list[int]] = {}
        for place, name in enumerate(classes):
            for key in keys(name):
                places.setdefault(key, []).append(place)
        for index, name in enumerate(names):
            if not found[index]:
                found[index] = sorted({place for key in keys(name) for place in places.get(key, ())})
    return found


def _keys(name: str) -> list[str]:
    """Ways in which a class name may be written: the whole of it, and each of its synonyms ("tench, Tinca tinca")."""
    plain = " ".join(re.sub(r"[_\-\s]+", " ", name.casefold()).split())
    return list(dict.fromkeys([plain, *(part.strip() for part in plain.split(","))]))


def check_classes(labels: list[int], num_classes: int, source: DataSource) -> None:
    missing = labels.count(-1)
    if missing:
        raise ValueError(
            f"{source.name} has {missing} rows without a label (-1, or an empty cell, as which csv files also count NA and "
            "None): remove them, or choose another split"
        )
    outside = next((label for label in labels if not 0 <= label < num_classes), None)
    if outside is not None:
        raise ValueError(f"{source.name} has the label {outside}, the model has the classes 0 to {num_classes - 1}")
