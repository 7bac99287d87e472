"""How the promises by class of a calibrated model did on the rows of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .table import NO_VALUE, Section


def promises_by_class(validation: Mapping[str, Any] | None, values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return each promise with what became of it: its share, and losses among so many rows.

    Args:
        validation (`dict`, *optional*): what a decision keeps of its validation rows.
        values (`dict`): (rows,) each: answered, prediction, label.
    """
    validation = validation or {}
    if "groups" not in validation or not {"answered", "prediction", "label"} <= values.keys():
        return []
    answered, prediction, label = (values[name] for name in ("answered", "prediction", "label"))
    answered = answered.bool()
    is_wrong = answered & (prediction != label)
    promises = []
    for group in validation["groups"]:
        if group["risk"] is not None:
            is_in_group = torch.isin(prediction, torch.tensor(group["classes"]))
            counts = (int(is_in_group.sum()), int((answered & is_in_group).sum()), int((is_wrong & is_in_group).sum()))
            promises.append(_promise(f"wrong, predicted {group['name']}", group["risk"], *counts))
    lost = validation.get("lost")
    if lost is not None:
        is_true = label == lost["label"]
        rows = int(is_true.sum())
        promises.append(
            _promise(f"lost rows of {lost['name']}", lost["share"], rows, rows, int((is_wrong & is_true).sum()))
        )
    return promises


def _promise(name: str, share: float, rows: int, counted: int, losses: int) -> dict[str, Any]:
    return {"name": name, "share": share, "rows": rows, "counted": counted, "losses": losses}


def section_of_promises(promises: Mapping[str, Sequence[Mapping[str, Any]]]) -> Section:
    """Return a table with a row for each promise of each model."""
    lines = []
    for model, of_model in promises.items():
        for promise in of_model:
            counted = promise["counted"]
            found = f"{100 * promise['losses'] / counted:.2f}" if counted else NO_VALUE
            cells = [str(promise["rows"]), str(counted), f"{100 * promise['share']:.4g}", found]
            lines.append([model, promise["name"], *cells])
    header = ["Model", "Promise", "Rows", "Counted", "Promised (%)", "Found (%)"]
    return "Promises by class", [(header, lines)]
