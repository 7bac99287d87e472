"""Held-out data: read once, and divided into rows to search with, to calibrate on and to judge by."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..data.batches import batches, check_is_data, split_labels
from ..data.evaluation_data import check_label_range
from ..data.fingerprints import fingerprint_of_rows, fingerprints_of_rows
from ..data.loading import ood_groups


Batch = dict[str, Tensor]

LEAST_ROWS = 60  # a third of them is the least that a decision can be calibrated on
LEAST_OOD_ROWS = 4
FEW_ROWS = 100  # to judge by
MOST_SEARCH_ROWS = 1_000
MOST_CALIBRATION_ROWS = 2_000


@dataclass(frozen=True)
class HeldOut:
    """Rows that no model was trained on, in batches on the CPU; no row is in two parts.

    search: by which circuits are extracted, and what members share is decided
    calibration: on which temperature and prediction sets are fitted
    judging: by which candidates are compared
    ood_search, ood: rows of the OOD sets for circuits, all together; and those for judging, group -> name -> batches
    fingerprints: of all rows, by data set
    """

    search: list[Batch]
    calibration: list[Batch]
    judging: list[Batch]
    ood_search: list[Batch] | None = None
    ood: dict[str, dict[str, list[Batch]]] = field(default_factory=dict)
    fingerprints: dict[str, str] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        """How the rows were divided, and whether they are few."""
        parts = [f"{rows_in(self.search):,} rows of data are for the search (circuits, what to share)"]
        parts += [f"{rows_in(self.calibration):,} for calibration", f"{rows_in(self.judging):,} for judging"]
        if self.ood_search is None:
            ood = "detection is not measured, as there is no ood_data"
        else:
            judging = sum(rows_in(each) for sets in self.ood.values() for each in sets.values())
            ood = f"of ood_data {rows_in(self.ood_search):,} for circuits, {judging:,} for judging"
        notes = [f"{', '.join(parts)}; {ood}."]
        if rows_in(self.judging) < FEW_ROWS:
            notes.append(
                f"Only {rows_in(self.judging)} rows judge, which show large differences alone: pass more data, better 3,000 rows."
            )
        return notes


def rows_in(data: list[Batch]) -> int:
    return sum(map(_rows, data))


def held_out(
    data: Any, ood_data: Any, num_classes: int, batch_size: int, seed: int, classes: Sequence[str] | None = None
) -> HeldOut:
    """Reads and divides the data; the same data and seed give the same parts.

    data: a DataLoader, a list of dict batches, or a Dataset or list of dict rows, with labels
    ood_data: `{"near": {name: data}, "far": {name: data}}`, `{name: data}`, one data set, or None
    classes: the model's class names, for labels that are names
    """
    known = _read(data, "data", batch_size, classes)
    _check_labels(known, num_classes)
    count = rows_in(known)
    if count < LEAST_ROWS:
        raise ValueError(
            f"data has {count} rows: pass at least {LEAST_ROWS}, better 3,000, to choose and calibrate by"
        )
    fingerprints = {"data": _fingerprint(known)}
    sizes = [min(MOST_SEARCH_ROWS, count // 3), min(MOST_CALIBRATION_ROWS, count // 3)]
    parts = [select(known, rows, batch_size) for rows in divided(count, sizes, seed)]
    foreign = ood_groups(ood_data)
    if not foreign:
        return HeldOut(*parts, fingerprints=fingerprints)
    ood, search = {}, []
    most = max(1, MOST_SEARCH_ROWS // sum(map(len, foreign.values())))
    for group, sets in foreign.items():
        ood[group] = {}
        for name, each in sets.items():
            place = f"ood_data[{name!r}]" if group == "OOD" else f"ood_data[{group!r}][{name!r}]"
            found = [split_labels(batch)[0] for batch in _read(each, place, batch_size)]
            if rows_in(found) < LEAST_OOD_ROWS:
                raise ValueError(f"{place} has {rows_in(found)} rows: pass at least {LEAST_OOD_ROWS}, better 1,000")
            fingerprints[place] = _fingerprint(found)
            first, second = divided(rows_in(found), [min(most, rows_in(found) // 2)], seed)
            search += select(found, first, batch_size)
            ood[group][name] = select(found, second, batch_size)
    return HeldOut(*parts, search, ood, fingerprints)


def divided(count: int, sizes: list[int], seed: int) -> list[Tensor]:
    """The numbers 0 to count - 1 in random parts of these sizes, and the rest; each in order."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed), device="cpu")
    return [part.sort().values for part in order.split([*sizes, count - sum(sizes)])]


def select(data: list[Batch], rows: Tensor, batch_size: int) -> list[Batch]:
    """Some rows of data in batches, by their numbers, which are in order; batches of one length are filled up again."""
    chosen, start = [], 0
    for batch in data:
        inside = rows[(rows >= start) & (rows < start + _rows(batch))] - start
        if len(inside):
            chosen.append({name: tensor[inside] for name, tensor in batch.items()})
        start += _rows(batch)
    filled: list[Batch] = []
    for piece in chosen:
        is_alike = bool(filled) and _shapes(filled[-1]) == _shapes(piece)
        room = max(0, batch_size - _rows(filled[-1])) if is_alike else 0
        first, rest = (
            {name: tensor[part] for name, tensor in piece.items()} for part in (slice(room), slice(room, None))
        )
        if room:
            filled[-1] = {name: torch.cat([filled[-1][name], tensor]) for name, tensor in first.items()}
            piece = rest
        if _rows(piece):
            filled.append(piece)
    return filled


def rows_of(data: list[Batch]) -> Iterator[Batch]:
    """One by one."""
    for batch in data:
        for row in range(_rows(batch)):
            yield {name: tensor[row] for name, tensor in batch.items()}


def _rows(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _shapes(batch: Batch) -> dict[str, tuple]:
    return {name: (tensor.dtype, *tensor.shape[1:]) for name, tensor in batch.items()}


def _read(data: Any, name: str, batch_size: int, classes: Sequence[str] | None = None) -> list[Batch]:
    check_is_data(data, name)
    found = []
    for batch in batches(data, batch_size, "cpu", classes=classes):
        inputs, labels = split_labels(batch)
        found.append(inputs if labels is None else {**inputs, "labels": labels})
    if not found:
        raise ValueError(f"{name} is empty: pass at least one sample")
    return found


def _check_labels(data: list[Batch], num_classes: int) -> None:
    for batch in data:
        labels = batch.get("labels")
        if labels is None:
            raise ValueError("data has no labels: add a column labels (or label) with class indices")
        if labels.is_floating_point() or labels.dim() != 1:
            raise ValueError(
                f"the labels of data are {labels.dtype} of shape {tuple(labels.shape)}: pass one class index per row"
            )
        check_label_range(labels, "data", num_classes)


def _fingerprint(data: list[Batch]) -> str:
    return fingerprint_of_rows([digest for batch in data for digest in fingerprints_of_rows(batch)])
