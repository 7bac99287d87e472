"""How the promises by class or group of a calibrated model did on the rows of a report."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.stats import beta
from torch import Tensor

from .table import NO_VALUE, Section, Table


def promises_by_group(validation: Mapping[str, Any] | None, values: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return each promise with what became of it: its share, and losses among so many rows.

    Args:
        validation (`dict`, *optional*): what a decision keeps of its validation rows.
        values (`dict`): (rows,) each: answered; wrong; by which promises are made, prediction or
            group; label, where promises are about true rows.
    """
    validation = validation or {}
    key = "group" if "column" in validation else "prediction"
    if "groups" not in validation or not {"answered", "wrong", key} <= values.keys():
        return []
    answered = values["answered"].bool()
    is_wrong = answered & values["wrong"].bool()
    kind = validation.get("column", "predicted")
    promises = []
    for group in validation["groups"]:
        if group["risk"] is not None:
            is_in_group = torch.isin(values[key], torch.tensor(group["classes"]))
            counts = (int(is_in_group.sum()), int((answered & is_in_group).sum()), int((is_wrong & is_in_group).sum()))
            promises.append(_promise(f"wrong, {kind} {group['name']}", group["risk"], *counts))
    lost = validation.get("lost")
    if lost is not None:
        is_true = values["label"] == lost["label"]
        rows = int(is_true.sum())
        promises.append(
            _promise(f"lost rows of {lost['name']}", lost["share"], rows, rows, int((is_wrong & is_true).sum()))
        )
    return promises


def _promise(name: str, share: float, rows: int, counted: int, losses: int) -> dict[str, Any]:
    return {"name": name, "share": share, "rows": rows, "counted": counted, "losses": losses}


# Metrics in which a promise lands, by what was promised, and what they count among.
RISK_METRICS = ("answered_risk",)
COVERAGE_METRICS = ("set_coverage", "interval_coverage")
MISS_METRICS = ("set_missed",)
LEVEL = 0.05  # of the test that a promise is broken


def shares_asked_for(settings: Any) -> list[dict[str, Any]]:
    """Return the shares that a calibration was asked to keep, and the metrics in which they land.

    Args:
        settings (`DecisionSettings`): of a model's decision.
    """
    validation = settings.validation or {}
    shares = []
    if validation.get("risk") is not None:
        shares.append({"metrics": list(RISK_METRICS), "share": validation["risk"], "is_highest": True})
    if settings.alpha is not None:
        shares.append({"metrics": list(COVERAGE_METRICS), "share": 1 - settings.alpha, "is_highest": False})
        shares.append({"metrics": list(MISS_METRICS), "share": settings.alpha, "is_highest": True})
    return shares


def landed_table(
    shares: Sequence[Mapping[str, Any]], metrics: Mapping[str, float], titles: Mapping[str, str]
) -> Table | None:
    """Return the table of what was asked for, where it landed, and whether it was kept.

    None where nothing was asked for that was measured.

    Args:
        shares (`list`): of `shares_asked_for`.
        metrics (`dict`): of the model on the data, with `num_samples`.
        titles (`dict`): metric -> what it is called.
    """
    rows = []
    for asked in shares:
        for metric in asked["metrics"]:
            if metric not in metrics:
                continue
            found = metrics[metric]
            counted = metrics["num_samples"]
            if metric in RISK_METRICS:
                counted *= metrics["answered"]
            bound = "at most" if asked["is_highest"] else "at least"
            share = f"{bound} {100 * asked['share']:.4g} %"
            is_kept = _is_kept(found, asked["share"], asked["is_highest"], round(counted))
            rows.append([titles[metric], share, f"{100 * found:.1f} %", f"{counted:,.0f}", is_kept])
    if not rows:
        return None
    return ["", "Promised or asked for", "Where it landed", "Rows", "Kept"], rows


def _is_kept(found: float, share: float, is_highest: bool, rows: int) -> str:
    """Return "yes", "no", or that chance explains a share beyond the promised one."""
    if found <= share if is_highest else found >= share:
        return "yes"
    losses = found if is_highest else 1 - found
    promised = share if is_highest else 1 - share
    count = max(1, round(losses * rows))
    # How often at least so many of the rows are lost where the promise is just kept.
    chance = float(beta.cdf(promised, count, rows - count + 1)) if promised > 0 else 0.0
    if chance < LEVEL:
        return "no"
    return "not on these rows, by no more than chance"


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
    return "Promises by class or group", [(header, lines)]
