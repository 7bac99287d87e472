"""`calibrate --then` and `predict --then`: several models in a row, with one promise."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .folders import note_training_rows
from .options import best_device, option, typed


if TYPE_CHECKING:
    from ..serving.cascade import Cascade
    from .options import DataOptions

THEN_HELP = (
    "passes rows that MODEL is unsure of on to this model (a folder or Hub name), or to a person; repeat it for more. "
)
# The metavar of --then.
NEXT = "MODEL|person"


def then_option(rest: str, panel: str | None = None) -> Any:
    """Return the annotation of --then. rest: of its help"""
    return option(list[str] | None, THEN_HELP + rest, NEXT, panel)


def check_cascade_target(others: dict[str, Any]) -> None:
    """Raise for options of `calibrate` that are for one model.

    others: by flag, None where they are left out
    """
    for flag, value in others.items():
        if value not in (None, []):
            raise ValueError(
                f"{flag} is for one model, and --then makes a cascade, which promises a --risk: leave it out"
            )


def check_is_no_cascade(model: str) -> None:
    """Raise for the folder of a cascade: its first model alone would not keep the promise."""
    from ..serving.cascade_files import find_cascade, read_cascade

    file = find_cascade(model)
    if file is None:
        return
    behind = [stage.name for stage in read_cascade(file).stages[1:]]
    raise ValueError(f"{model} was calibrated together with {', '.join(behind)}: pass these, each as --then")


def check_can_be_recalibrated(model: str) -> None:
    """Raise for the folder of a cascade, whose answers are of several models."""
    from ..serving.cascade_files import find_cascade

    if find_cascade(model) is not None:
        raise ValueError(
            f"--add is for one model, and {model} is a cascade: calibrate it again, with --data of newly labelled "
            "rows and --then"
        )


def calibrated_cascade(
    model: str, then: Sequence[str], data: "DataOptions", risk: float, confidence: float | None
) -> "Cascade":
    """Return a cascade that was calibrated on --data; print what is promised."""
    from ..serving.cascade import Cascade
    from ..serving.saved_models import open_model

    opened = open_model(model)
    rows = data.read(opened.info, opened.processor)
    note_training_rows(model, data, rows)
    cascade = Cascade([model, *then], device=best_device())
    settings = {} if confidence is None else {"confidence": confidence}
    cascade.calibrate(rows, {"risk": risk}, **settings)
    return cascade


def load_cascade(model: str, then: Sequence[str], device: str | None, batch_size: int = 32) -> "Cascade":
    """Return the cascade of a folder; raise where it was not calibrated with these models."""
    from ..serving.cascade import Cascade
    from ..serving.cascade_files import find_cascade

    command = f"hydra-transformers calibrate {model} {typed(then=list(then))} --data ... --risk ..."
    together = f"calibrate the two together: {command}"
    if find_cascade(model) is None:
        raise ValueError(f"{model} has no cascade.json: {together}")
    return Cascade.load(model, then=then, device=device, batch_size=batch_size)


def line_of_cascade(row: Any, name: str, answer: dict[str, Any]) -> str:
    """Return a row of the table that `predict` prints. row: makes it of its cells"""
    label = f"I don't know ({answer['label']}?)" if answer["abstain"] else answer["label"]
    return row(name, label, f"{answer['confidence']:.3f}", "", "", answer["stage"] or "", answer["reason"] or "")
