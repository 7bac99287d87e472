"""The audit of a job: which of its answers people shall check, and the file that they fill in."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..uncertainty.audits import AUDIT_ID, REVIEWED_LABEL, calibration_id, check_can_be_audited, draw_for_audit


if TYPE_CHECKING:
    from .predictor import HydraPredictor

OURS = (AUDIT_ID, REVIEWED_LABEL)


class Audit:
    """Draws answers of a job at random, and collects them for reviewers.

    Args:
        audit_id (`str`): of the calibration, the job and the seed.
        share (`float`): of the answers that are drawn.
        file (`Path`): the reviewers' file.
        columns (`list[str]`): those that are not the data's.
    """

    def __init__(self, audit_id: str, share: float, file: Path, columns: Sequence[str]):
        self.audit_id = audit_id
        self.share = share
        self.file = file
        self.columns = columns
        self.drawn: list[Any] = []  # a table of each part

    @classmethod
    def of(cls, predictor: "HydraPredictor", folder: Path, output: Path, share: float, seed: int) -> "Audit":
        """Return the audit of a job.

        Raises, before any work, where it cannot be audited or the file is there already.

        Args:
            predictor (`HydraPredictor`): answers the job's rows.
            folder (`Path`): of its parts, named by a digest of model, data and settings.
            output (`Path`): what the job writes.
            share (`float`), seed (`int`): of the draw.
        """
        settings = predictor.calibration
        check_can_be_audited(settings)
        file = output.with_suffix(".audit.csv")
        if file.exists() and not folder.exists():  # otherwise this job may have written it before it was stopped
            raise ValueError(f"{file} exists already: pass another output, or remove it")
        audit_id = f"{calibration_id(settings)}-{folder.suffixes[-2][1:]}-{seed}"
        return cls(audit_id, share, file, ["answer", "prediction", "why", "audit", *predictor.columns])

    @property
    def count(self) -> int:
        """How many answers were drawn."""
        return sum(len(table) for table in self.drawn)

    def marked(self, table: Any) -> Any:
        """Return a part of the output with the column `audit`, and keep its drawn rows."""
        import pyarrow

        names = ["input_audit" if name == "audit" else name for name in table.column_names]
        table = table.rename_columns(names)
        is_drawn = draw_for_audit(self.audit_id, table["row"].to_pylist(), self.share)
        answers = table.select(["abstain", "detector_score"]).to_pylist()
        marks = [drawn and _is_answer(answer) for drawn, answer in zip(is_drawn, answers, strict=True)]
        self.drawn.append(table.filter(pyarrow.array(marks)))
        return table.append_column("audit", pyarrow.array(marks))

    def for_reviewers(self) -> Any:
        """Return the drawn rows as people shall see them.

        They have the data and the prediction, not how sure the model was, but for the score that
        decides, which a later calibration needs; with an empty column for the label.
        """
        import pyarrow

        drawn = pyarrow.concat_tables(self.drawn)
        data = [name for name in drawn.column_names if name not in (*self.columns, *OURS)]
        shown = drawn.select([*data, "prediction", "detector_score"])
        empty = pyarrow.array([""] * len(drawn), "string")
        ids = pyarrow.array([self.audit_id] * len(drawn), "string")
        return shown.append_column(REVIEWED_LABEL, empty).append_column(AUDIT_ID, ids)


def _is_answer(row: Mapping[str, Any]) -> bool:
    """Whether a row could be read, and is answered."""
    score = row["detector_score"]
    return not row["abstain"] and score is not None and math.isfinite(score)
