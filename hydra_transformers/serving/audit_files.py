"""The audit of a job: which of its answers people shall check, and the file that they fill in."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from ..uncertainty.audit_codes import encode_row
from ..uncertainty.audits import (
    AUDIT_CODE,
    AUDIT_ID,
    REVIEWED_LABEL,
    calibration_id,
    check_can_be_audited,
    draw_for_audit,
    promises_what_audits_tell,
)


if TYPE_CHECKING:
    from .predictor import HydraPredictor

logger = logging.get_logger(f"transformers.{__name__}")

OURS = (AUDIT_CODE, AUDIT_ID, REVIEWED_LABEL)


def audit_file_of(output: Path) -> Path:
    """Return the name of the reviewers' file beside the output of a job."""
    return output.with_suffix(".audit.csv")


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
        if not promises_what_audits_tell(settings):
            logger.warning(
                "this model promises no share of wrong answers, and audited answers tell of nothing "
                "else: `watch --labels` counts them for no promise. `calibrate --add` can make one "
                "of them, with --risk"
            )
        file = audit_file_of(output)
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

        They have the data and the prediction, not how sure the model was, and an empty column for
        the label. The score that decides, which a later calibration needs, is in a code.
        """
        import pyarrow

        drawn = pyarrow.concat_tables(self.drawn)
        data = [name for name in drawn.column_names if name not in (*self.columns, *OURS)]
        shown = drawn.select([*data, "prediction"])
        empty = pyarrow.array([""] * len(drawn), "string")
        rows = drawn.select(["row", "detector_score"]).to_pylist()
        codes = [
            encode_row(self.audit_id, str(row["row"]), place, row["detector_score"]) for place, row in enumerate(rows)
        ]
        ids = pyarrow.array([self.audit_id] * len(drawn), "string")
        shown = shown.append_column(REVIEWED_LABEL, empty)
        shown = shown.append_column(AUDIT_CODE, pyarrow.array(codes, "string"))
        return shown.append_column(AUDIT_ID, ids)


def _is_answer(row: Mapping[str, Any]) -> bool:
    """Whether a row could be read, and is answered."""
    score = row["detector_score"]
    return not row["abstain"] and score is not None and math.isfinite(score)
