"""Audits: a random share of a model's answers, which people check, and that tells whether it keeps its promise.

Which answers are drawn depends on their row's number and a seed, never on a score, so that those that people have labelled are a
random choice among all answers.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from ..data.columns import DataSource
from ..data.rows import load_rows
from .task import Outcomes


if TYPE_CHECKING:
    from .monitor import Monitor

REVIEWED_LABEL = "reviewed_label"  # the column that reviewers fill in
AUDIT_ID = "audit_id"  # the column that says of which audit a row is
NEEDED = ("row", "prediction", "detector_score", AUDIT_ID, REVIEWED_LABEL)
TASKS = ("single_label_classification", "multi_label_classification", "reward")
RELEVANT = ("1", "1.0", "true", "yes")  # of rewards


class Reviews(NamedTuple):
    """The rows of a file that people have labelled, in their order.

    names: (rows,), of each row, the same in every copy of the file
    audit_ids: (rows,), empty for a row that was not drawn
    scores: (rows,), of the model's detector
    wrong: (rows,), whether the label is another one than the prediction
    predictions: (rows,), as texts
    unused_labels: labels that no row has as its prediction: perhaps misspelt
    """

    names: list[str]
    audit_ids: list[str]
    scores: np.ndarray
    wrong: np.ndarray
    predictions: list[str]
    unused_labels: list[str]

    @property
    def sentence(self) -> str:
        drawn = np.array([bool(audit) for audit in self.audit_ids], dtype=bool)
        wrong = self.wrong[drawn]
        share = f", {wrong.mean():.2%} wrong".replace("%", " %") if len(wrong) else ""
        sentence = f"{len(wrong):,} audited answers are labelled{share}."
        if (~drawn).any():
            sentence += f" {int((~drawn).sum()):,} other rows are labelled, which were not drawn."
        return sentence


def calibration_id(settings: Mapping[str, Any]) -> str:
    """Return what tells one calibration from another.

    Args:
        settings (`dict`): of a decision, or of a monitor, which has the part of them that this reads.
    """
    part = {name: settings[name] for name in ("task", "alpha", "threshold", "validation", "digests")}
    return hashlib.sha256(json.dumps(part, sort_keys=True).encode()).hexdigest()[:12]


def check_can_be_audited(settings: Mapping[str, Any] | None) -> None:
    """Raise for a model that has no calibration, or none whose answers are right or wrong row by row."""
    if settings is None:
        raise ValueError("audit is for calibrated models: call calibrate() first")
    if "validation" not in settings:
        raise ValueError("this model was calibrated without what an audit compares with: call calibrate() again")
    if settings["task"] not in TASKS:
        task = settings["task"].replace("_", " ")
        raise ValueError(f"audit is for rows that are right or wrong as a whole, this is {task}: leave it out")


def draw_for_audit(audit_id: str, rows: Iterable[int], share: float) -> list[bool]:
    """Return which rows are drawn: each with the chance `share`, by a hash of the audit's id and the row's number.

    Args:
        audit_id (`str`): of the job and its seed.
        rows (`list[int]`): the numbers of rows.
        share (`float`): of them that are drawn.

    Example:
        >>> sum(draw_for_audit("monday", range(10_000), 0.02))
        190
    """
    digests = (hashlib.sha256(f"{audit_id} {row}".encode()).digest() for row in rows)
    return [int.from_bytes(digest[:8], "big") < share * 2**64 for digest in digests]


def read_reviews(data: Any, task: str) -> Reviews:
    """Read a file of audited answers with the labels that people gave them.

    Rows are labelled in their order: those after the last label are left for later. A row without one between others raises an
    error, as reviewers skip what is hard to label, and the rest is no random choice any more.

    Args:
        data (`str`, `os.PathLike`, `DataFrame` or `list[dict]`): the file that `predict --audit` wrote, with labels in the column
            `reviewed_label`.
        task (`str`): of the model: what makes a prediction wrong.
    """
    name = os.fspath(data) if isinstance(data, (str, os.PathLike)) else "reviews"
    rows = load_rows(DataSource(name if isinstance(data, (str, os.PathLike)) else data)).rows
    rows = [{column: _text(cell) for column, cell in row.items() if column in NEEDED} for row in rows]
    missing = [column for column in NEEDED if rows and column not in rows[0]]
    if missing or not rows:
        column = missing[0] if missing else REVIEWED_LABEL
        raise ValueError(
            f"{name} has no column {column!r}: pass the file that predict --audit wrote, with labels in {REVIEWED_LABEL}"
        )
    labelled = [place for place, row in enumerate(rows) if row[REVIEWED_LABEL]]
    if not labelled:
        raise ValueError(f"{name} has no labels: fill in the column {REVIEWED_LABEL}")
    rows = rows[: labelled[-1] + 1]
    for row in rows:
        if not row[REVIEWED_LABEL] and row[AUDIT_ID]:
            raise ValueError(
                f"{name}: row {row['row']} has no {REVIEWED_LABEL}, and rows after it have one: label rows in their order, as those "
                "that are skipped differ from the others"
            )
    rows = [row for row in rows if row[REVIEWED_LABEL]]
    predictions = {row["prediction"] for row in rows}
    unused = {row[REVIEWED_LABEL] for row in rows} - predictions if task == "single_label_classification" else set()
    return Reviews(
        names=[_name_of(row) for row in rows],
        audit_ids=[row[AUDIT_ID] for row in rows],
        scores=np.array([_score_of(row, name) for row in rows]),
        wrong=np.array([_is_wrong(row["prediction"], row[REVIEWED_LABEL], task) for row in rows], dtype=bool),
        predictions=[row["prediction"] for row in rows],
        unused_labels=sorted(unused),
    )


def count_reviews(monitor: "Monitor", reviews: Reviews) -> None:
    """Count reviewed rows for the promise of a monitor; those that it has counted before are not counted again.

    Args:
        monitor (`Monitor`): of the calibration that answered.
        reviews (`Reviews`): see `read_reviews`. Rows that were not drawn for an audit count for no promise.
    """
    expected = calibration_id(monitor.settings)
    others = {audit for audit in reviews.audit_ids if audit and not audit.startswith(expected)}
    if others:
        raise ValueError(
            f"the audit {min(others)} is of another calibration than the monitor: pass the file of this one"
        )
    groups = _groups_of(reviews, monitor.settings["validation"])
    is_new = np.array([f"labels {name}" not in monitor.batches for name in reviews.names], dtype=bool)
    is_drawn = np.array([bool(audit) for audit in reviews.audit_ids], dtype=bool)
    for chosen, places in (("answered", is_new & is_drawn), ("other", is_new & ~is_drawn)):
        if places.any():
            scores = torch.from_numpy(reviews.scores[places])
            wrong = torch.from_numpy(reviews.wrong[places])
            outcomes = Outcomes(scores, torch.ones_like(wrong), wrong)
            if groups is not None:
                outcomes = outcomes._replace(groups=groups[torch.from_numpy(places)])
            monitor.count(outcomes, chosen)
    monitor.batches.update(f"labels {name}" for name in reviews.names)


def _groups_of(reviews: Reviews, validation: Mapping[str, Any]) -> torch.Tensor | None:
    """Return the group of each row, by which promises by group are counted; None where there are none.

    A row of another group than the calibration knows is of none: -1.
    """
    if "groups" not in validation:
        return None
    names = validation.get("names")
    if names is None:
        raise ValueError(
            "this calibration keeps promises by group without the names of the groups: call calibrate() again"
        )
    places = {name: place for place, name in enumerate(names)}
    return torch.tensor([places.get(prediction, -1) for prediction in reviews.predictions])


def _text(cell: Any) -> str:
    """A cell as it is compared: lists, in which a table keeps several labels, as predictions show them."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):  # an empty cell of a DataFrame
        return ""
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        return ", ".join(map(str, cell)) or "no label"
    return str(cell).strip()


def _name_of(row: Mapping[str, str]) -> str:
    if row[AUDIT_ID]:
        return f"{row[AUDIT_ID]}:{row['row']}"
    return "other:" + hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _score_of(row: Mapping[str, str], name: str) -> float:
    try:
        score = float(row["detector_score"])
    except ValueError:
        score = math.nan
    if math.isnan(score):
        raise ValueError(
            f"{name}: row {row['row']} has the detector_score {row['detector_score']!r}: leave it as it was written"
        )
    return score


def _is_wrong(prediction: str, label: str, task: str) -> bool:
    if task == "reward":  # what is answered counts as relevant
        return label.lower() not in RELEVANT
    if task == "multi_label_classification":
        return set(prediction.split(", ")) != {part.strip() for part in label.split(",")}
    return prediction != label
