"""Calibrates a calibrated model again with the answers that people have audited since."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from ..data.loading import load_if_named
from ..data.prediction import device_of
from ..models.decision import Decision
from ..models.decision_settings import typed_settings
from .abstention import Abstention, check_share
from .audits import Reviews, calibration_id, check_can_be_audited, read_reviews
from .calibrated_classifier import CalibratedClassifier
from .calibration import DEFAULT_CONFIDENCE, LEAST_ROWS, Calibration, halves_of
from .features import without_decision
from .monitor import validation_summary
from .task import Outcomes, Rows, TaskFit
from .tasks import task_fit_of


class AnsweredRows(NamedTuple):
    """Rows that a model answers: (rows,) scores of its detector, and whether it is wrong."""

    scores: np.ndarray
    wrong: np.ndarray


def recalibrate(
    model: nn.Module,
    reviews: Any,
    data: Any = None,
    *,
    risk: float,
    confidence: float = DEFAULT_CONFIDENCE,
    batch_size: int = 32,
    seed: int = 0,
) -> Calibration:
    """Lower the threshold of a calibrated model so that a risk holds for rows like those that were audited.

    The temperature, the detector and the sets stay. Audited rows are a random choice among the answers, so that they say nothing of
    rows on which the model abstained: the threshold can be lowered, or stay where it is. To raise it, or where inputs have changed,
    label a random choice of all rows and call `calibrate`.

    Args:
        model (`nn.Module`): a calibrated Hydra, which is changed, or a `CalibratedClassifier`, which is left as it is.
        reviews (`str`, `os.PathLike`, `DataFrame` or `list[dict]`): the file of `predict --audit` with labels, of this calibration.
        data (*optional*): the rows that the model was calibrated on, with the same `seed`: those of the half that set the threshold
            are used, too, where they were answered. Leave it out if a monitor says that the promise is broken: rows that are no longer
            like the new ones would hide it.
        risk (`float`): at most this share of the answered rows is wrong.
        confidence (`float`, *optional*, defaults to 0.9): of the promise.
        batch_size (`int`, *optional*, defaults to 32), seed (`int`, *optional*, defaults to 0): as in `calibrate`.

    Returns:
        `Calibration`: the model with the new threshold, and what is promised now.
    """
    check_share(risk, "risk")
    check_share(confidence, "confidence")
    inner, decision = without_decision(model)
    settings = None if decision is None else typed_settings(decision.settings).to_dict()
    check_can_be_audited(settings)
    for name, groups in (("thresholds", "class"), ("by_group", "group")):
        if settings.get(name) is not None:
            raise ValueError(
                f"model keeps a promise for each {groups}, which has its own threshold: calibrate it on labelled rows"
            )
    task = task_fit_of(inner)
    if task.has_detector:
        task.set_detector(settings["detector"]["name"])
    audited = _audited_rows(read_reviews(reviews, task.name), settings)
    answered = audited
    halves = None
    if data is not None:
        halves = _rows_of_data(task, load_if_named(data, inner, labelled=True), batch_size, seed)
        outcomes = _outcomes(task, decision, halves[1])
        scores = outcomes.scores[outcomes.answered].double().numpy()
        wrong = outcomes.wrong.numpy()
        answered = AnsweredRows(np.append(scores, audited.scores), np.append(wrong, audited.wrong))
    abstention = lower_threshold(answered, settings["threshold"], risk, confidence)

    # The decision as it was, but for its threshold and what is said and kept of it.
    threshold = abstention.threshold
    settings["threshold"] = threshold if math.isfinite(threshold) else str(threshold)
    settings["sentences"] = _sentences(abstention, audited, answered)
    state = {name: decision.get_buffer(name) for name in settings["state"]}
    changed = task.decision(settings, state)
    is_kept = answered.scores <= threshold
    wrong = [int(answered.wrong[is_kept].sum()), int(is_kept.sum())]
    # Without rows of which some are not answered, nobody knows the new share of answers.
    summary = settings["validation"] | {"answered": None}
    if halves is not None:
        summary = validation_summary(
            _outcomes(task, changed, halves[1]), _outcomes(task, changed, halves[0]).scores, risk
        )
    changed.settings = replace(changed.settings, validation=summary | {"wrong": wrong, "risk": risk})
    changed.to(device_of(inner))
    changed.remember(inner)
    result = _with_decision(model, inner, changed)
    rows = (0, len(answered.scores))
    return Calibration(result, changed.settings.to_dict(), abstention, rows, settings["sentences"])


def lower_threshold(rows: AnsweredRows, threshold: float | str | None, risk: float, confidence: float) -> Abstention:
    """Return the rule that keeps a risk, with a threshold that is at most the one by which these rows were answered.

    Given that a row was answered, audited rows and new ones have one distribution: they are independent draws from the rows up to that
    threshold. Above it there are none. Validation rows up to it are alike but for one thing: they have set the threshold. How often
    a promise is broken that was made with them is known by simulation alone, and was below one minus the confidence.

    Args:
        rows (`AnsweredRows`): with scores up to the threshold.
        threshold (`float` or `str`): by which they were answered; "inf" or None where all were.
        risk (`float`), confidence (`float`): the promise.
    """
    highest = math.inf if threshold is None else float(threshold)
    scores = torch.from_numpy(rows.scores)
    if torch.equal(scores, scores.float().double()):  # the model compares in this dtype
        scores = scores.float()
    fitted = Abstention.fit(scores, ~torch.from_numpy(rows.wrong), risk=risk, confidence=confidence)
    return replace(fitted, threshold=min(fitted.threshold, highest))


def _audited_rows(reviews: Reviews, settings: Mapping[str, Any]) -> AnsweredRows:
    """The rows that were drawn from the answers of this calibration."""
    expected = calibration_id(settings)
    others = {audit for audit in reviews.audit_ids if audit and not audit.startswith(expected)}
    if others:
        raise ValueError(
            f"the audit {min(others)} is of another calibration than the model: pass the model that answered"
        )
    is_drawn = np.array([bool(audit) for audit in reviews.audit_ids], dtype=bool)
    if is_drawn.sum() < LEAST_ROWS:
        raise ValueError(
            f"reviews has {is_drawn.sum()} audited rows with labels: pass at least {LEAST_ROWS}, better 300"
        )
    return AnsweredRows(reviews.scores[is_drawn], reviews.wrong[is_drawn])


def _rows_of_data(task: TaskFit, data: Any, batch_size: int, seed: int) -> list[Rows]:
    """The two halves that a calibration on the same data has made."""
    collected = task.collect_rows(data, batch_size)
    return [collected.take(places) for places in halves_of(collected.labels, seed)]


def _outcomes(task: TaskFit, decision: Decision, rows: Rows) -> Outcomes:
    random = torch.Generator().manual_seed(0)
    return task.outcomes(decision(rows.answers, rows.features), rows.labels, decision.settings, random)


def _sentences(abstention: Abstention, audited: AnsweredRows, answered: AnsweredRows) -> list[str]:
    of_validation = len(answered.scores) - len(audited.scores)
    origin = f"{len(audited.scores):,} audited answers"
    if of_validation:
        origin += f" and {of_validation:,} validation rows that were answered"
    kept = f"{100 * abstention.coverage:.3g} % of them are still answered"
    errors = f"{100 * abstention.risk_without:.3g} % are wrong"
    if abstention.coverage < 1:
        errors += f", {100 * abstention.risk:.3g} % of those still answered"
    return [f"Of {origin}, {errors}; {kept}. {abstention.guarantee}"]


def _with_decision(model: nn.Module, inner: nn.Module, decision: Decision) -> nn.Module:
    if isinstance(model, CalibratedClassifier):
        return CalibratedClassifier(inner, decision)
    model.eval().decision = decision.eval()
    model.config.decision = decision.settings.to_dict()
    return model
