"""Multi-label classification: metrics, a threshold per label, sets that miss at most a promised share of the labels.

Every label is a yes or no of its own. The ensemble's prediction is the mean of the members' sigmoids, held as log-odds.
"""

import math
import warnings
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ..models.ensembling import at_least_float32
from ..models.task import DecisionOutput
from ..models.task_multi_label import logit_of_mean_probability
from .abstention import SHIFT, exact
from .conformal import too_few_rows
from .costs import PricedRows, fit_costs
from .decomposition import decompose
from .inputs import as_member_logits, as_multi_hot, check_predictions, widened
from .metrics import counts_from_the_top, exact_mean, expected_calibration_error
from .task import CLASS_COLUMNS, Fitted, Metrics, Outcomes, Rows, Settings, TaskFit, ValidationRows, draw_one
from .temperature import fit_temperature


ROUNDING = 1e-9  # of log-odds


def log_odds(member_logits: Any) -> Tensor:
    """The log-odds of the members' mean probability of each label, (batch, labels) in float64."""
    member_logits = as_member_logits(member_logits, least_classes=1).detach()
    check_predictions(member_logits, have_softmax=False)
    return logit_of_mean_probability(widened(member_logits))


# Metrics


def multi_label_metrics(member_logits: Any, labels: Any) -> dict[str, float]:
    r"""Ranking, decisions and calibration of the members' mean probability `p̄` of each label.

    With the decisions `ŷ_l = [p̄_l >= 0.5]` over n rows and L labels:

        map          mean over the labels of their average precision, Σ_k (recall_k - recall_{k-1}) precision_k over the
                     distinct p̄_l, highest first; not interpolated
        f1_micro     2 TP / (2 TP + FP + FN), counted over all labels together
        f1_macro     mean over the labels of their own F1
        accuracy     share of the n · L decisions that are right
        exact_match  share of the rows of which all decisions are right
        missed       mean over the rows of the share of their labels with ŷ_l = 0; 0 for a row without labels
        ece          mean over the labels of Σ_b n_b/n |frequency_b - p̄_b| over 15 equal-width bins of p̄_l
        nll, brier   mean of the binary cross entropy, and of (p̄_l - y_l)², over all n · L decisions

    `map` and `f1_macro` leave out a label that no row has, and are NaN where every label is one of these.

    Args:
        member_logits: (samples, members, labels).
        labels: (samples, labels), 0 or 1.

    Example:
        >>> metrics = multi_label_metrics([[[2.0, -1.0]], [[1.0, 3.0]], [[-2.0, 0.5]]], [[1, 0], [0, 1], [0, 0]])
        >>> round(metrics["map"], 3), round(metrics["f1_micro"], 3), round(metrics["exact_match"], 3)
        (1.0, 0.667, 0.333)
    """
    logits = log_odds(member_logits)
    labels = as_multi_hot(labels, *logits.shape).to(logits.device)
    return summarize_labels(logits, labels, logits >= 0)


def summarize_labels(logits: Tensor, labels: Tensor, chosen: Tensor) -> dict[str, float]:
    """`multi_label_metrics` from log-odds in float64, labels and decisions, (samples, labels) each."""
    precisions, f1_scores, calibration_errors = [], [], []
    for scores, truth, yes in zip(logits.T.cpu(), labels.T.cpu(), chosen.T.cpu(), strict=True):
        calibration_errors.append(expected_calibration_error(scores.sigmoid(), truth.double()))
        if truth.any():
            precisions.append(_average_precision(*counts_from_the_top(scores, truth)))
            f1_scores.append(2 * int((yes & truth).sum()) / (int(yes.sum()) + int(truth.sum())))
    right, hits = chosen == labels, int((chosen & labels).sum())
    named = int(chosen.sum()) + int(labels.sum())
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
    return {
        "map": math.fsum(precisions) / len(precisions) if precisions else math.nan,
        "f1_micro": 2 * hits / named if named else math.nan,
        "f1_macro": math.fsum(f1_scores) / len(f1_scores) if f1_scores else math.nan,
        "accuracy": int(right.sum()) / right.numel(),
        "exact_match": int(right.all(dim=1).sum()) / len(right),
        "missed": exact_mean(missed_shares(chosen, labels)),
        "ece": math.fsum(calibration_errors) / len(calibration_errors),
        "nll": exact_mean(losses.flatten()),
        "brier": exact_mean((logits.sigmoid() - labels.to(logits)).square().flatten()),
    }


def _average_precision(hits: Tensor, false_alarms: Tensor) -> float:
    new_hits = hits.diff(prepend=hits.new_zeros(1))
    return math.fsum((new_hits * hits.double() / (hits + false_alarms)).tolist()) / int(hits[-1])


def missed_shares(chosen: Tensor, labels: Tensor) -> Tensor:
    """The share of each row's labels that is not chosen (the false negative rate), (batch,); 0 for a row without labels."""
    count = labels.sum(dim=1)
    return (labels & ~chosen).sum(dim=1).double() / count.clamp(min=1)


# Thresholds


def best_thresholds(logits: Tensor, labels: Tensor) -> Tensor:
    """The probability (labels,) from which on each label is answered with yes, for the highest F1 on these rows.

    It lies midway, in log-odds, between two neighbouring rows; of equally good ones the highest is taken. A label that no row
    has keeps 0.5, and so does one whose every row has it.

    logits: (rows, labels), log-odds; labels: (rows, labels) bool
    """
    return torch.stack(list(map(_best_cut, logits.T.cpu(), labels.T.cpu()))).sigmoid()


def _best_cut(scores: Tensor, truth: Tensor) -> Tensor:
    if truth.all() or not truth.any():
        return torch.zeros((), dtype=torch.float64, device="cpu")
    hits, false_alarms = counts_from_the_top(scores, truth)
    best = int((2 * hits / (hits + false_alarms + int(truth.sum()))).argmax())
    descending = scores.unique().flip(0)
    if best + 1 == len(descending):  # below all rows, by half of their mean distance
        return descending[best] - (descending[0] - descending[best]) / (2 * len(scores))
    return (descending[best] + descending[best + 1]) / 2


# Sets that miss few labels


def lowered_cuts(logits: Tensor, labels: Tensor, alpha: float, cuts: Tensor) -> Tensor:
    r"""The least log-odds (labels,) with which a label is in a row's set, so that on average at most a share `alpha` of a row's
    labels is missed: conformal risk control (Angelopoulos et al., 2022, arXiv 2208.02814).

    With the ensemble's log-odds `z_l`, the cuts `t_l` and one shift λ for all labels,

        set       C_λ(x) = {l : z_l >= t_l - λ}            larger λ, larger sets
        loss      L_i(λ) = share of row i's labels that C_λ misses, 0 for a row without labels; never above B = 1
        choice    the smallest λ >= 0 with  n/(n+1) · 1/n Σ_i L_i(λ) + B/(n+1) <= alpha: a label that reaches its own
                  threshold is always in the set

    If a new row is exchangeable with these n, the expected share of its labels that is missed is at most alpha, on average over
    calibration sets and rows: not for every label, and not under distribution shift. With too few rows λ is infinite.

    logits: (rows, labels), of rows that neither the model nor the cuts were fitted on; labels: (rows, labels) bool
    cuts: (labels,), the log-odds from which on each label is predicted
    """
    allowed = float(exact(alpha) * (len(labels) + 1) - 1)
    if allowed < 0:
        return torch.full_like(cuts, -math.inf)
    needed = cuts.to(logits) - logits  # the λ from which on each label is in its row's set
    row_of_label, zero = labels.nonzero()[:, 0], needed.new_zeros(1)
    shifts, order = torch.cat([zero, needed[labels].clamp(min=0)]).sort(stable=True)
    # What a label's absence adds to the sum of losses
    weights = torch.cat([zero, 1 / labels.sum(dim=1)[row_of_label].double()])[order]
    # Losses left over once the labels up to each place are in their sets; ties enter together.
    left = weights.flip(0).cumsum(0).flip(0) - weights
    is_last = torch.cat([shifts[1:] > shifts[:-1], torch.ones(1, dtype=torch.bool, device=shifts.device)])
    tolerance = 1e-12 * (len(labels) + 1)  # sums of thirds are rounded
    return cuts - float(shifts[is_last & (left <= allowed + tolerance)][0])


def label_sets(logits: Tensor, lowest: Tensor) -> Tensor:
    """Whether log-odds (rows, labels) reach the lowest of their label; differences were rounded, and in doubt they do."""
    return logits >= lowest.to(logits) - ROUNDING


def sets_sentence(alpha: float, sets: Tensor, is_too_few: bool) -> str:
    """What is promised for new rows and under which conditions, the size of the sets, and whether rows were too few."""
    rows, labels = sets.shape
    note = f" {too_few_rows(alpha, rows)}" if is_too_few else ""
    return (
        f"On average at most {100 * alpha:.6g} % of a row's labels are missing from its set, over calibration sets and "
        f"rows, if new rows are exchangeable with the {rows} calibration rows. {SHIFT} On the fitting rows sets hold "
        f"{int(sets.sum()) / rows:.3g} of {labels} labels.{note}"
    )


# The task


class MultiLabelFit(TaskFit):
    name = "multi_label_classification"
    metrics: ClassVar = {
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
    columns = CLASS_COLUMNS | {"labels": "strings", "scores": "label scores"}

    def constant_metric(self, labels: Tensor) -> float:
        return float(labels.double().mean())

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """`multi_label_metrics` (with the thresholds of a calibrated model), how much members differ, summed over the labels,
        and what a calibrated model's sets and threshold bring."""
        answers = answers if decided is None else decided.member_logits
        parts, logits = decompose(answers, "multi_label_classification"), log_odds(answers)
        chosen = logits >= 0 if decided is None else decided.chosen_labels
        metrics, right = {}, None
        if labels is not None:
            labels = as_multi_hot(labels, *logits.shape)
            metrics, right = summarize_labels(logits, labels, chosen), chosen == labels
        metrics["mutual_information"] = exact_mean(parts.epistemic.sum(dim=1))
        metrics["disagreement"] = exact_mean(parts.disagreement.mean(dim=1))
        if decided is None:
            return metrics
        sets, answered = decided.prediction_set, ~decided.abstain
        if sets is not None:
            metrics["set_size"] = exact_mean(sets.sum(dim=1).double())
            if labels is not None:
                metrics["set_missed"] = exact_mean(missed_shares(sets, labels))
        metrics["answered"] = exact_mean(answered.double())
        if right is not None and answered.any():
            metrics["answered_right"] = exact_mean(right.all(dim=1)[answered].double())
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """The sum of the labels' entropies."""
        return decompose(answers, "multi_label_classification").total.sum(dim=1)

    def of_members(self, member_logits: Tensor, scores: list[dict], settings: Settings | None) -> dict[str, Any]:
        """With the `thresholds` of the labels."""
        order = [self.classes.index(score["label"]) for score in scores]
        log_odds = [0.0] * len(self.classes) if settings is None else settings["log_odds"]
        thresholds = torch.tensor(list(map(float, log_odds)), dtype=torch.float64).sigmoid()
        return {"thresholds": thresholds[order].tolist(), "members": member_logits.sigmoid()[:, order].tolist()}

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        outcomes, sets, missed = super().outcomes(output, labels, settings, random), output.prediction_set, None
        if labels is None:
            return outcomes
        answered, labels = outcomes.answered, as_multi_hot(labels, *output.member_logits.shape[::2])
        logits = log_odds(output.member_logits[answered])  # others may not be numbers
        wrong = (logits >= torch.tensor([float(value) for value in settings["log_odds"]])) != labels[answered]
        if sets is not None:  # one of the row's labels
            drawn = draw_one(labels, random).unsqueeze(1)
            missed = (labels & ~sets).gather(1, drawn).squeeze(1)
        return outcomes._replace(wrong=wrong.any(dim=1), missed=missed)

    # Calibration

    def fit(self, rows: ValidationRows) -> Fitted:
        """One temperature, a threshold per label, sets that miss few labels, and when to abstain.

        The first half of the rows fits the temperature, for the likelihood of every yes and no, and the thresholds, for each
        label's best F1. The second half lowers these to sets that keep the promise of `alpha` (see `lowered_cuts`), and fits the
        target: of rows, whose score is the sum of their labels' entropies and which are right if all their decisions are.
        """
        first, second = (
            Rows(half.answers, as_multi_hot(half.labels, len(half.answers), half.answers.shape[-1]))
            for half in (rows.first, rows.second)
        )
        self._check_has_every_label(first.labels.any(dim=0) | second.labels.any(dim=0))
        temperature = fit_temperature(first.answers, first.labels)
        thresholds = best_thresholds(log_odds(at_least_float32(first.answers) / temperature), first.labels)
        settings = {
            "detector": {"name": "entropy"},
            "temperature": temperature,
            "log_odds": thresholds.logit().tolist(),
            "set_log_odds": None,
        }
        sentences = [
            f"Logits are divided by {temperature:.3g}. A label is predicted from a probability of its own on, "
            f"{float(thresholds.min()):.2g} to {float(thresholds.max()):.2g}.",
            rows.sentence,
        ]
        abstention = None
        if rows.alpha is not None:
            logits = log_odds(at_least_float32(second.answers) / temperature)
            lowest = lowered_cuts(logits, second.labels, rows.alpha, thresholds.logit())
            is_too_few = bool(lowest[0] == -math.inf)
            if is_too_few:
                warnings.warn(too_few_rows(rows.alpha, len(logits)), stacklevel=3)
            values = [value if math.isfinite(value) else str(value) for value in lowest.tolist()]
            settings |= {"alpha": float(rows.alpha), "set_log_odds": values}
            sentences.append(sets_sentence(rows.alpha, label_sets(logits, lowest), is_too_few))
        if rows.target is not None:
            decision = self.decision(settings)
            output = decision(second.answers)
            wrong = (output.chosen_labels != second.labels).any(dim=1)
            if rows.costs is not None:
                before = decision(first.answers)
                first_wrong = (before.chosen_labels != first.labels).any(dim=1)
                chosen_by = PricedRows(before.detector_score, rows.costs.of_errors(first_wrong), first_wrong)
                measured_by = PricedRows(output.detector_score, rows.costs.of_errors(wrong), wrong)
                abstention = fit_costs(rows.costs, rows.confidence, chosen_by, measured_by)
            else:
                abstention = rows.fit_abstention(output.detector_score, ~wrong, rows.ood_scores(decision))
            sentences.append(f"A row is right if all its labels are. {abstention.sentence}")
        return Fitted(settings, sentences, abstention)

    def _check_has_every_label(self, is_there: Tensor) -> None:
        missing = (~is_there).nonzero().flatten().tolist()
        if missing:
            names = [repr(label if self.classes is None else self.classes[label]) for label in missing[:5]]
            raise ValueError(f"no row of data has the label {', '.join(names)}, so it has no threshold: add some")
