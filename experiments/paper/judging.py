"""The numbers of one method with one seed: all columns of the paper, for each data set."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from hydra_transformers import evaluate_uncertainty
from hydra_transformers.cost import count_multiply_adds, count_parameters

from .data import EVALUATION_BATCH, as_batches


CLASSIFICATION = ("accuracy", "brier", "nll", "ece", "aece")
DIVERSITY = ("mutual_information", "disagreement")
DETECTION = ("auroc", "fpr95", "aupr")
NAME = "model"


def judged(model: nn.Module, test: Any, ood: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return {"members", "parameters", "multiply_adds", "data": metrics, "ood": {group: {set: metrics}}}."""
    batches = {group: {name: as_batches(rows) for name, rows in of_group.items()} for group, of_group in ood.items()}
    report = evaluate_uncertainty({NAME: model}, as_batches(test), batches, batch_size=EVALUATION_BATCH)
    metrics = report.models[NAME]

    # {group: {set: metrics}}, each set by its name alone.
    detected: dict[str, dict[str, dict[str, float]]] = {}
    for place in report.data_sets():
        group, name, _ = report.groups[place]
        found = {metric: metrics[place][metric] for metric in (*DETECTION, *DIVERSITY)}
        detected.setdefault(group, {})[name] = found
    return {
        "members": report.num_members[NAME],
        "parameters": count_parameters(model),
        "multiply_adds": count_multiply_adds(model),
        "data": {metric: metrics["data"][metric] for metric in (*CLASSIFICATION, *DIVERSITY)},
        "ood": detected,
    }


def judged_under_shift(model: nn.Module, test: Any, corruptions: Mapping[str, Mapping[int, Any]]) -> dict[str, Any]:
    """Return {"severities": {severity or "average": {"accuracy", "brier"}}} (tables 13 and 14)."""
    sweep = {
        corruption: {severity: as_batches(rows) for severity, rows in of_one.items()}
        for corruption, of_one in corruptions.items()
    }
    report = evaluate_uncertainty({NAME: model}, as_batches(test), corruptions=sweep, batch_size=EVALUATION_BATCH)
    found = report.severities(NAME)
    return {
        "severities": {
            severity: {name: values[name] for name in ("accuracy", "brier")} for severity, values in found.items()
        }
    }
