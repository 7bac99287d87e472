"""Fits and judges the decisions of models of several labels: a threshold per label, sets, and when to abstain."""

from collections.abc import Mapping

from torch import Tensor

from ..models.task_decisions import DecidedLabels, LabelsDecision
from .abstention import Abstention, check_share, check_target, what_it_buys
from .decomposition import decompose
from .inputs import as_multi_hot
from .metrics import exact_mean
from .multi_label import LabelSets, best_thresholds, log_odds, missed_shares, summarize_labels
from .task import CLASS_COLUMNS, Task
from .task_calibration import Fitted, HeldOutRows, Rows
from .temperature import fit_temperature


# Calibration


def check_label_target(target: Mapping[str, float]) -> None:
    """As `check_target`, and {"label_risk": 0.01}: at most this share of the decisions on single labels is wrong."""
    if isinstance(target, Mapping) and set(target) == {"label_risk"}:
        check_share(target["label_risk"], "label_risk")
    else:
        check_target(target)


def fit_labels(rows: HeldOutRows) -> Fitted:
    """One temperature, a threshold per label, sets that miss few labels, and when to abstain.

    The first half of the rows fits the temperature, for the likelihood of every yes and no, and the thresholds, for each
    label's best F1. The second half lowers these to sets that keep the promise of `alpha` (see `LabelSets`), and fits the
    target: of rows, whose score is the sum of their labels' entropies and which are right if all their decisions are; or with
    "label_risk" of single labels, whose score is minus the distance of their log-odds to the threshold.
    """
    per_label = rows.target is not None and "label_risk" in rows.target
    if per_label and rows.confidence is not None:
        raise ValueError(
            "confidence is for rows: the decisions on one row's labels depend on each other, so that no share of them can be "
            'guaranteed; leave it out, or pass target={"risk": ...}'
        )
    first, second = (_checked(part) for part in (rows.first, rows.second))
    _check_has_every_label(first.labels.any(dim=0) | second.labels.any(dim=0), rows.classes)
    scaling = fit_temperature(*first)
    [temperature] = scaling.temperature
    thresholds = best_thresholds(scaling(first.answers), first.labels)
    settings = {
        "detector": {"name": "distance" if per_label else "entropy"},
        "threshold": None,
        "alpha": None,
        "temperature": temperature,
        "log_odds": thresholds.logit().tolist(),
        "set_log_odds": None,
        "per_label": per_label,
    }
    sentences = [
        f"Logits are divided by {temperature:.3g}. A label is answered with yes from a probability of its own on, "
        f"{float(thresholds.min()):.2g} to {float(thresholds.max()):.2g}.",
        f"Of {len(first.labels) + len(second.labels)} rows, a random half ({len(first.labels)}) fitted these, and the other half "
        f"({len(second.labels)}) what follows: promises need rows that nothing else was fitted on.",
    ]
    if rows.alpha is not None:
        sets = LabelSets.fit(scaling(second.answers), second.labels, rows.alpha, thresholds)
        settings |= {"alpha": sets.alpha, "set_log_odds": sets.to_dict()["log_odds"]}
        sentences.append(sets.sentence)
    abstention = None
    if rows.target is not None:
        abstention = _fit_abstention(rows, rows.unfinished(LabelsDecision, settings), second)
        settings["threshold"] = abstention.to_dict()["threshold"]
        sentences.append(_sentence(abstention, per_label))
    return Fitted(settings, sentences, abstention)


def _checked(part: Rows) -> Rows:
    rows, _, num_labels = part.answers.shape
    return Rows(part.answers, as_multi_hot(part.labels, rows, num_labels))


def _check_has_every_label(is_there: Tensor, classes: list[str] | None) -> None:
    missing = (~is_there).nonzero().flatten().tolist()
    if missing:
        names = [str(label) if classes is None else repr(classes[label]) for label in missing]
        listed = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
        raise ValueError(
            f"no row of data has the label {listed}: when it is to be answered with yes cannot be learned from these rows, add "
            "rows that have it"
        )


def _fit_abstention(rows: HeldOutRows, decision: LabelsDecision, second: Rows) -> Abstention:
    decided = decision(second.answers)
    scores, right = decided.detector_score, decided.answer == second.labels
    ood_scores = None if rows.ood is None else decision(rows.ood).detector_score.flatten()
    name = decision.settings["detector"]["name"]
    try:
        if decision.settings["per_label"]:
            [risk] = rows.target.values()
            return Abstention.fit(scores.flatten(), right.flatten(), ood_scores, risk=risk, score=name)
        right = right.all(dim=1)
        return Abstention.fit(scores, right, ood_scores, **rows.target, confidence=rows.confidence, score=name)
    except ValueError as error:
        what = (
            "decisions on labels"
            if decision.settings["per_label"]
            else "rows, which are right if all their labels are"
        )
        raise ValueError(f"{error} (fitted on half of data: {scores.numel()} {what})") from error


def _sentence(abstention: Abstention, per_label: bool) -> str:
    if not per_label:
        return f"A row is right if all its labels are. {abstention.sentence}"
    bought = what_it_buys(abstention.coverage, abstention.risk, abstention.risk_without)
    return f"Of the {abstention.rows} decisions on labels of the fitting rows, {bought}. {abstention.guarantee}"


# Evaluation

LABEL_COLUMNS = {
    "map": ("mAP", "high"),
    "f1_micro": ("F1 micro", "high"),
    "f1_macro": ("F1 macro", "high"),
    "exact_match": ("All right", "high"),
    "missed": ("Missed", "low"),
    "ece": ("ECE", "low"),
    "nll": ("NLL", "low"),
    "brier": ("Brier", "low"),
    "mutual_information": ("MI", ""),
    "disagreement": ("DI", ""),
    "set_missed": ("Missed by sets", ""),
    "set_size": ("Set size", "low"),
    "answered": ("Answered", ""),
    "answered_right": ("Right of answered", "high"),
}


def measure_labels(answers: Tensor, labels: Tensor | None, decided: DecidedLabels | None) -> dict[str, float]:
    """`multi_label_metrics` (with the thresholds of a calibrated model), how much members differ, summed over the labels, and
    what a calibrated model's sets and threshold bring; without labels what can be said without them."""
    answers = answers if decided is None else decided.member_logits
    parts, logits = decompose(answers, "multi_label_classification"), log_odds(answers)
    chosen = logits >= 0 if decided is None else decided.answer
    metrics, right = {}, None
    if labels is not None:
        labels = as_multi_hot(labels, *logits.shape)
        metrics, right = summarize_labels(logits, labels, chosen), chosen == labels
    metrics["mutual_information"] = exact_mean(parts.epistemic.sum(dim=1))
    metrics["disagreement"] = exact_mean(parts.disagreement.mean(dim=1))
    if decided is None:
        return metrics
    if decided.prediction_set is not None:
        metrics["set_size"] = exact_mean(decided.prediction_set.sum(dim=1).double())
        if labels is not None:
            metrics["set_missed"] = exact_mean(missed_shares(decided.prediction_set, labels))
    answered = ~decided.abstain
    metrics["answered"] = exact_mean(answered.flatten().double())
    if right is not None and answered.any():
        right = right if answered.dim() == 2 else right.all(dim=1)
        metrics["answered_right"] = exact_mean(right[answered].double())
    return metrics


def label_scores(answers: Tensor) -> Tensor:
    """How uncertain each row is, the sum of its labels' entropies: (rows, members, labels) -> (rows,)"""
    return decompose(answers, "multi_label_classification").total.sum(dim=1)


class MultiLabelTask(Task):
    name = "multi_label_classification"
    title = "multi-label classification"
    metrics = LABEL_COLUMNS
    columns = CLASS_COLUMNS | {"labels": "strings", "scores": "label scores"}

    def check_target(self, target: Mapping[str, float]) -> None:
        check_label_target(target)

    def fit(self, rows: HeldOutRows) -> Fitted:
        return fit_labels(rows)

    def measure(
        self, answers: Tensor, labels: Tensor | None, decision_output: DecidedLabels | None = None
    ) -> dict[str, float]:
        return measure_labels(answers, labels, decision_output)

    def scores(self, answers: Tensor) -> Tensor:
        return label_scores(answers)
