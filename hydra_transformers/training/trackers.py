"""Checks, before a training starts, that what it is to be logged with is installed."""

from collections.abc import Sequence

from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)


# Transformers does not list these wherever they work: their callbacks check for themselves.
NOT_LISTED = ("azure_ml", "flyte", "kubeflow")
PACKAGES = {"comet_ml": "comet-ml"}  # others are named like the integration


def check_can_report_to(report_to: str | Sequence[str] | None) -> None:
    """Raise for a tracker that Trainer does not know, or whose package is not installed.

    report_to: as in `TrainingArguments`: a name or several, "all", "none", or nothing
    """
    if report_to is None or report_to in ("all", "none"):
        return
    names = [report_to] if isinstance(report_to, str) else report_to
    for name in names:
        if name in ("all", "none") and len(names) == 1:
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            raise ValueError(f"report_to is {name!r}: pass one or more of {', '.join(INTEGRATION_TO_CALLBACK)}")
        if name not in NOT_LISTED and name not in get_available_reporting_integrations():
            package = PACKAGES.get(name, name)
            raise ImportError(f"report_to is {name!r}, which is not installed: pip install {package}")
