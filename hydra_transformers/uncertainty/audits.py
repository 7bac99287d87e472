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
from ..models.decision_settings import places_of_groups
from .audit_codes import AuditedRow, decode_row
from .task import Outcomes


if TYPE_CHECKING:
    from .monitor import Monitor

REVIEWED_LABEL = "reviewed_label"  # the column that reviewers fill in
AUDIT_ID = "audit_id"  # the column that says of which audit a row is
AUDIT_CODE = "audit_code"  # the column that keeps the score and the place in the draw
NEEDED = ("row", "prediction", AUDIT_CODE, AUDIT_ID, REVIEWED_LABEL)
TASKS = ("single_label_classification", "multi_label_classification", "reward")
RELEVANT = ("1", "1.0", "true", "yes")  # of rewards


class Reviews(NamedTuple):
    """The rows of a file that people have labelled, in their order.

    names: (rows,), of each row, the same in every copy of the file
    audit_ids: (rows,), empty for a row that was not drawn
    scores: (rows,), of the model's detector; not a number for a row that was not drawn
    wrong: (rows,), whether the label is another one than the prediction
    groups: (rows,), the names by which promises by group count them: predictions, or the cells of a column
    unused_labels: labels that no row has as its prediction: perhaps misspelt
    """

    names: list[str]
    audit_ids: list[str]
    scores: np.ndarray
    wrong: np.ndarray
    groups: list[str]
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


def promises_what_audits_tell(settings: Mapping[str, Any]) -> bool:
    """Whether a calibration promises a share of wrong answers, of all or by group, which is all that checked answers tell of.

    A share of lost rows of a class, say, is also of rows that the model did not answer.
    """
    validation = settings["validation"]
    risks = [validation.get("risk"), *(group["risk"] for group in validation.get("groups", ()))]
    return any(risk is not None for risk in risks)


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


def read_reviews(data: Any, task: str, column: str | None = None) -> Reviews:
    """Read a file of audited answers with the labels that people gave them.

    Rows are labelled in the order in which they were drawn: those after the last label are left for later. One that is missing or
    has no label between others raises an error, as reviewers skip what is hard to label, and the rest is no random choice any more.
    In which order the file has them does not matter. A row counts once, however often the file has it.

    Args:
        data (`str`, `os.PathLike`, `DataFrame` or `list[dict]`): the file that `predict --audit` wrote, with labels in the column
            `reviewed_label`.
        task (`str`): of the model: what makes a prediction wrong.
        column (`str`, *optional*): by which the model keeps its promises; by default these are by prediction, or of all rows.
    """
    name = os.fspath(data) if isinstance(data, (str, os.PathLike)) else "reviews"
    rows = load_rows(DataSource(name if isinstance(data, (str, os.PathLike)) else data)).rows
    group_column = "prediction"
    if column is not None:
        # A job renames a column of the data that has the name of one of its own.
        renamed = f"input_{column}"
        group_column = renamed if rows and column not in rows[0] and renamed in rows[0] else column
    needed = (*NEEDED, group_column)
    rows = [{key: _text(cell) for key, cell in row.items() if key in needed} for row in rows]
    missing = [key for key in needed if rows and key not in rows[0]]
    if missing or not rows:
        first = missing[0] if missing else REVIEWED_LABEL
        raise ValueError(
            f"{name} has no column {first!r}: pass the file that predict --audit wrote, with labels in {REVIEWED_LABEL}"
        )
    rows = _without_repetitions(rows, name)
    if not any(row[REVIEWED_LABEL] for row in rows):
        raise ValueError(f"{name} has no labels: fill in the column {REVIEWED_LABEL}")
    _check_are_first_drawn(rows, name)
    rows = [row for row in rows if row[REVIEWED_LABEL]]
    predictions = {row["prediction"] for row in rows}
    unused = {row[REVIEWED_LABEL] for row in rows} - predictions if task == "single_label_classification" else set()
    return Reviews(
        names=[_name_of(row) for row in rows],
        audit_ids=[row[AUDIT_ID] for row in rows],
        scores=np.array([_score_of(row, name) for row in rows]),
        wrong=np.array([_is_wrong(row["prediction"], row[REVIEWED_LABEL], task) for row in rows], dtype=bool),
        groups=[row[group_column] if column is None else _whole_number(row[group_column]) for row in rows],
        unused_labels=sorted(unused),
    )


def count_reviews(monitor: "Monitor", reviews: Reviews) -> None:
    """Count reviewed rows for the promise of a monitor; those that it has counted before are not counted again.

    Args:
        monitor (`Monitor`): of the calibration that answered.
        reviews (`Reviews`): see `read_reviews`. Rows that were not drawn for an audit count for no promise. One that was counted
            with another label raises an error, as its bet cannot be taken back.
    """
    _check_labels_are_as_before(monitor, reviews)
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
    monitor.batches.update(_outcome_marks(reviews))


def _outcome_marks(reviews: Reviews) -> list[str]:
    """Return what a monitor keeps of each drawn row: whether it was counted as right or as wrong."""
    rows = zip(reviews.names, reviews.audit_ids, reviews.wrong, strict=True)
    return [f"labelled {_outcome(wrong)} {name}" for name, audit, wrong in rows if audit]


def _outcome(is_wrong: bool) -> str:
    return "wrong" if is_wrong else "right"


def _check_labels_are_as_before(monitor: "Monitor", reviews: Reviews) -> None:
    """Raise for a drawn row that was counted as right and now is wrong, or the other way round."""
    for name, audit, wrong in zip(reviews.names, reviews.audit_ids, reviews.wrong, strict=True):
        if audit and f"labelled {_outcome(not wrong)} {name}" in monitor.batches:
            row = name.rpartition(":")[2]
            raise ValueError(
                f"row {row} was counted as {_outcome(not wrong)}, and by its label now it is {_outcome(wrong)}: to count all labels "
                "anew, remove the file of the counted labels (of watch FILE, FILE.labels.json), and pass all audit files again"
            )


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
    return places_of_groups(reviews.groups, names)


def _text(cell: Any) -> str:
    """A cell as it is compared: lists, in which a table keeps several labels, as predictions show them."""
    if cell is None or (isinstance(cell, float) and math.isnan(cell)):  # an empty cell of a DataFrame
        return ""
    if isinstance(cell, Sequence) and not isinstance(cell, str):
        return ", ".join(map(str, cell)) or "no label"
    return str(cell).strip()


def _without_repetitions(rows: Sequence[dict[str, str]], file: str) -> list[dict[str, str]]:
    """Return each row once; of copies the one with a label. Copies with different labels raise an error.

    A table that was pasted twice, or the copies of two reviewers in one file, would make few labels look like many.
    """
    by_name: dict[str, dict[str, str]] = {}
    for row in rows:
        row["row"] = _whole_number(row["row"])
        earlier = by_name.setdefault(_name_of(row), row)
        label = row[REVIEWED_LABEL]
        if not earlier[REVIEWED_LABEL]:
            earlier[REVIEWED_LABEL] = label
        elif label and label != earlier[REVIEWED_LABEL]:
            raise ValueError(
                f"{file} has row {row['row']} twice, with the labels {earlier[REVIEWED_LABEL]!r} and {label!r}: keep the right one"
            )
    return list(by_name.values())


def _whole_number(text: str) -> str:
    """Return a row's number as it was written: a table with empty cells makes 12.0 of 12."""
    return text.removesuffix(".0")


def _check_are_first_drawn(rows: Sequence[Mapping[str, str]], file: str) -> None:
    """Raise where the labelled rows of an audit are not the first that were drawn, without a gap.

    The first ones are a random choice. Those that somebody has picked, by sorting the file, say, are none.
    """
    audits: dict[str, dict[int, Mapping[str, str]]] = {}
    for row in rows:
        if row[AUDIT_ID]:
            audits.setdefault(row[AUDIT_ID], {})[_code_of(row, file).place] = row
    for audit, drawn in audits.items():
        labelled = [place for place, row in drawn.items() if row[REVIEWED_LABEL]]
        for place in range(max(labelled, default=-1)):
            if place not in drawn:
                raise ValueError(
                    f"{file}: the drawn row number {place + 1:,} of the audit {audit} is missing, and later ones have labels: pass the "
                    "whole file, as rows that are left out differ from the others"
                )
            if not drawn[place][REVIEWED_LABEL]:
                raise ValueError(
                    f"{file}: row {drawn[place]['row']} has no {REVIEWED_LABEL}, and rows after it have one: label rows in the order in "
                    "which they were drawn, as those that are skipped differ from the others"
                )


def _name_of(row: Mapping[str, str]) -> str:
    if row[AUDIT_ID]:
        return f"{row[AUDIT_ID]}:{row['row']}"
    return "other:" + hashlib.sha256(json.dumps(row, sort_keys=True).encode()).hexdigest()[:16]


def _score_of(row: Mapping[str, str], file: str) -> float:
    """Return the detector's score of a row; not a number for one that was not drawn, which counts for no promise."""
    if not row[AUDIT_ID]:
        return math.nan
    return _code_of(row, file).score


def _code_of(row: Mapping[str, str], file: str) -> AuditedRow:
    code = decode_row(row[AUDIT_ID], row["row"], row[AUDIT_CODE])
    if code is None:
        raise ValueError(
            f"{file}: row {row['row']} has the {AUDIT_CODE} {row[AUDIT_CODE]!r}: leave row, {AUDIT_CODE} and {AUDIT_ID} as they were "
            "written"
        )
    return code


def _is_wrong(prediction: str, label: str, task: str) -> bool:
    if task == "reward":  # what is answered counts as relevant
        return label.lower() not in RELEVANT
    if task == "multi_label_classification":
        return set(prediction.split(", ")) != {part.strip() for part in label.split(",")}
    return prediction != label
