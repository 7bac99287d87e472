"""Measures what a model predicts on validation and test rows, in distribution and out of it."""

from collections.abc import Mapping
from statistics import mean

import numpy as np
import torch
from torch import Tensor, nn

from hydra_transformers.uncertainty import (
    Abstention,
    TemperatureScaling,
    classification_metrics,
    ood_metrics,
    ood_score,
)
from hydra_transformers.uncertainty.metrics import diversity_metrics, error_coverage_curve, sample_values

from .rows import TensorRows
from .splits import Splits


EVALUATION_BATCH = 500
RISK = 0.05  # of the answers that may be wrong
CONFIDENCE = 0.9  # in a threshold that promises it
DRAWS = 100  # of calibration rows
SCORES = ("msp", "energy")

Logits = Mapping[str, Tensor]  # by the name of a set, (rows, members, classes)


def sets_of(splits: Splits) -> dict[str, TensorRows]:
    """Return the sets that a model is judged on: "validation", "validation_ood", "test", and "near/NAME" or "far/NAME"."""
    sets = {"validation": splits.validation, "test": splits.test}
    if splits.validation_ood is not None:
        sets["validation_ood"] = splits.validation_ood
    for group, named in splits.ood.items():
        for name, rows in named.items():
            sets[f"{group}/{name}"] = rows
    return sets


@torch.inference_mode()
def predictions(model: nn.Module, rows: TensorRows, device: str) -> Tensor:
    """Return the logits of each member in bfloat16's precision on a GPU: (rows, members, classes)."""
    parts = []
    for batch in rows.batches(EVALUATION_BATCH):
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            outputs = model(**inputs)
        logits = outputs.logits.unsqueeze(1)
        if "member_logits" in outputs:
            logits = outputs.member_logits
        parts.append(logits.float())
    return torch.cat(parts)


def judge(logits: Logits, labels: Mapping[str, Tensor]) -> dict[str, dict[str, float]]:
    """Return the metrics of validation and of test rows, each with the detection of its out-of-distribution sets.

    Args:
        logits: Of every set.
        labels: Of "validation" and "test".
    """
    scaling = TemperatureScaling.fit(logits["validation"], labels["validation"])
    on_validation = metrics_of(logits["validation"], labels["validation"], scaling)
    on_test = metrics_of(logits["test"], labels["test"], scaling)
    on_test |= answered_as_calibrated(logits, labels)

    known = {"validation": logits["validation"], "test": logits["test"]}
    for group, names in ood_groups(logits).items():
        place = "validation" if group == "validation_ood" else "test"
        values = on_validation if group == "validation_ood" else on_test
        for score in SCORES:
            in_distribution = ood_score(known[place], score)
            found = [ood_metrics(in_distribution, ood_score(logits[name], score)) for name in names]
            for metric in ("auroc", "fpr95", "aupr"):
                values[f"{group}_{score}_{metric}"] = mean(each[metric] for each in found)
    return {"validation": on_validation, "test": on_test}


def ood_groups(logits: Logits) -> dict[str, list[str]]:
    """Return the names of out-of-distribution sets by group: "validation_ood", "near", "far"."""
    groups: dict[str, list[str]] = {}
    for name in logits:
        if name not in ("validation", "test"):
            groups.setdefault(name.split("/")[0], []).append(name)
    return groups


def metrics_of(logits: Tensor, labels: Tensor, scaling: TemperatureScaling) -> dict[str, float]:
    """Return the metrics of one set, some of them with a temperature too."""
    values = classification_metrics(logits, labels) | diversity_metrics(logits)
    rows = sample_values(logits, labels)
    values["failure_auroc"] = auroc_of_failures(rows["confidence"], rows["correct"])
    values["answered_at_5"] = answered_at(RISK, rows["confidence"], rows["correct"])
    tempered = classification_metrics(scaling(logits), labels)
    for name in ("nll", "brier", "ece", "aece"):
        values[f"{name}_with_temperature"] = tempered[name]
    return values


def auroc_of_failures(confidence: Tensor, correct: Tensor) -> float:
    """Return how well confidence tells wrong predictions from right ones, whatever their number."""
    wrong = correct == 0
    if not wrong.any() or wrong.all():
        return 0.5
    return ood_metrics(-confidence[~wrong], -confidence[wrong])["auroc"]


def answered_at(errors: float, confidence: Tensor, correct: Tensor) -> float:
    """Return the largest share of rows, the most confident first, of which at most so many are wrong."""
    coverage, risk = error_coverage_curve(confidence, 1 - correct)
    within = (risk <= errors).nonzero()
    return float(coverage[within[-1, 0]]) if len(within) else 0.0


def answered_as_calibrated(logits: Logits, labels: Mapping[str, Tensor]) -> dict[str, float]:
    """Calibrate on draws of validation rows, with replacement, to at most `RISK` wrong answers.

    Returns:
        The means over `DRAWS` of the share of test rows that are answered, of the share of wrong answers, and the share of
        draws in which more than `RISK` of the answers are wrong.
    """
    answered, wrong = calibration_draws(logits, labels)
    return {
        "calibrated_answered": mean(answered),
        "calibrated_errors": mean(wrong),
        "calibrated_broken": mean(float(share > RISK) for share in wrong),
    }


def calibration_draws(logits: Logits, labels: Mapping[str, Tensor]) -> tuple[list[float], list[float]]:
    """Return, for each draw of validation rows, the share of test rows that are answered and that of wrong answers."""
    validation = sample_values(logits["validation"].cpu(), labels["validation"].cpu())
    test = sample_values(logits["test"].cpu(), labels["test"].cpu())
    generator = torch.Generator().manual_seed(0)
    answered = []
    wrong = []
    for _ in range(DRAWS):
        rows = torch.randint(len(validation["correct"]), (len(validation["correct"]),), generator=generator)
        try:
            rule = Abstention.fit(
                1 - validation["confidence"][rows], validation["correct"][rows], risk=RISK, confidence=CONFIDENCE
            )
        except ValueError:  # nothing can be promised
            answered.append(0.0)
            wrong.append(0.0)
            continue
        takes = ~rule.abstain(1 - test["confidence"])
        answered.append(float(takes.double().mean()))
        wrong.append(float((1 - test["correct"].double())[takes].mean()) if takes.any() else 0.0)
    return answered, wrong


def arrays_of(logits: Logits, labels: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
    """Return what a plot of errors and coverage needs.

    Returns:
        Of "validation" and "test" the rows' doubt, which is 1 - confidence and keeps its digits near 0, and whether they are
        right; and of each draw of calibration rows the share that is answered and that is wrong.
    """
    arrays = {}
    for name in ("validation", "test"):
        values = sample_values(logits[name].cpu(), labels[name].cpu())
        arrays[f"{name}_doubt"] = (1 - values["confidence"].double()).numpy().astype(np.float16)
        arrays[f"{name}_correct"] = values["correct"].bool().numpy()
    answered, wrong = calibration_draws(logits, labels)
    arrays["draws_answered"] = np.array(answered, np.float32)
    arrays["draws_wrong"] = np.array(wrong, np.float32)
    return arrays
