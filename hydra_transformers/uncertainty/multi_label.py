"""Multi-label classification: metrics, a threshold per label, sets that miss at most a promised
share of the labels.

Every label is a yes or no of its own. The ensemble's prediction is the mean of the members'
sigmoids, held as log-odds.
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
from .class_promises import with_settings
from .conformal import too_few_rows
from .costs import PricedRows, fit_costs
from .decomposition import decompose
from .few_rows import note_on_missed
from .inputs import as_member_logits, as_multi_hot, check_predictions, widened
from .metrics import counts_from_the_top, exact_mean, expected_calibration_error
from .task import CLASS_COLUMNS, Fitted, Metrics, Outcomes, Rows, Settings, TaskFit, ValidationRows, draw_one
from .temperature import fit_temperature


ROUNDING = 1e-9  # of log-odds


def log_odds(member_logits: Any) -> Tensor:
    """Return the log-odds of the members' mean probability of each label, (batch, labels) in
    float64."""
    member_logits = as_member_logits(member_logits, least_classes=1).detach()
    check_predictions(member_logits, have_softmax=False)
    return logit_of_mean_probability(widened(member_logits))


# Metrics


def multi_label_metrics(member_logits: Any, labels: Any) -> dict[str, float]:
    r"""Measure ranking, decisions and calibration of the members' mean probability `p̄` of each
    label.

    With the decisions `ŷ_l = [p̄_l >= 0.5]` over n rows and L labels:

        map          mean over the labels of their average precision,
                     Σ_k (recall_k - recall_{k-1}) precision_k over the distinct p̄_l, highest
                     first; not interpolated
        f1_micro     2 TP / (2 TP + FP + FN), counted over all labels together
        f1_macro     mean over the labels of their own F1
        accuracy     share of the n · L decisions that are right
        exact_match  share of the rows of which all decisions are right
        missed       mean over the rows of the share of their labels with ŷ_l = 0; 0 for a row
                     without labels
        ece          mean over the labels of Σ_b n_b/n |frequency_b - p̄_b| over 15 equal-width bins
                     of p̄_l
        nll, brier   mean of the binary cross entropy, and of (p̄_l - y_l)², over all n · L
                     decisions

    `map` and `f1_macro` leave out a label that no row has, and are NaN where every label is one of
    these.

    Args:
        member_logits: (samples, members, labels).
        labels: (samples, labels), 0 or 1.

    Example:
        >>> member_logits = [[[2.0, -1.0]], [[1.0, 3.0]], [[-2.0, 0.5]]]
        >>> metrics = multi_label_metrics(member_logits, [[1, 0], [0, 1], [0, 0]])
        >>> metrics["map"], round(metrics["f1_micro"], 3), round(metrics["exact_match"], 3)
        (1.0, 0.667, 0.333)
    """
    logits = log_odds(member_logits)
    labels = as_multi_hot(labels, *logits.shape).to(logits.device)
    return summarize_labels(logits, labels, logits >= 0)


def summarize_labels(logits: Tensor, labels: Tensor, chosen: Tensor) -> dict[str, float]:
    """Return `multi_label_metrics` from log-odds in float64, labels and decisions, (samples,
    labels) each."""
    # Label by label.
    precisions = []
    f1_scores = []
    calibration_errors = []
    for scores, truth, yes in zip(logits.T.cpu(), labels.T.cpu(), chosen.T.cpu(), strict=True):
        calibration_errors.append(expected_calibration_error(scores.sigmoid(), truth.double()))
        if truth.any():
            precisions.append(_average_precision(*counts_from_the_top(scores, truth)))
            f1_scores.append(_f1(yes, truth))

    # All labels together.
    right = chosen == labels
    targets = labels.to(logits)
    losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none")
    squares = (logits.sigmoid() - targets).square()
    return {
        "map": _mean(precisions),
        "f1_micro": _f1(chosen, labels),
        "f1_macro": _mean(f1_scores),
        "accuracy": int(right.sum()) / right.numel(),
        "exact_match": int(right.all(dim=1).sum()) / len(right),
        "missed": exact_mean(missed_shares(chosen, labels)),
        "ece": _mean(calibration_errors),
        "nll": exact_mean(losses.flatten()),
        "brier": exact_mean(squares.flatten()),
    }


def _f1(chosen: Tensor, labels: Tensor) -> float:
    """Return 2 TP / (2 TP + FP + FN); NaN where no label is chosen, and none is there."""
    named = int(chosen.sum()) + int(labels.sum())
    if named == 0:
        return math.nan
    hits = int((chosen & labels).sum())
    return 2 * hits / named


def _mean(values: list[float]) -> float:
    """Return the mean, rounded once; NaN of no values."""
    if not values:
        return math.nan
    return math.fsum(values) / len(values)


def _average_precision(hits: Tensor, false_alarms: Tensor) -> float:
    new_hits = hits.diff(prepend=hits.new_zeros(1))
    precisions = new_hits * hits.double() / (hits + false_alarms)
    return math.fsum(precisions.tolist()) / int(hits[-1])


def missed_shares(chosen: Tensor, labels: Tensor) -> Tensor:
    """Return the share of each row's labels that is not chosen (the false negative rate), (batch,);
    0 for a row without labels."""
    count = labels.sum(dim=1)
    return (labels & ~chosen).sum(dim=1).double() / count.clamp(min=1)


# Thresholds


def best_thresholds(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the probability (labels,) from which on each label is answered with yes, for the
    highest F1 on these rows.

    It lies midway, in log-odds, between two neighbouring rows; of equally good ones the highest is
    taken. A label that no row has keeps 0.5, and so does one whose every row has it.

    logits: (rows, labels), log-odds
    labels: (rows, labels) bool
    """
    cuts = [_best_cut(scores, truth) for scores, truth in zip(logits.T.cpu(), labels.T.cpu(), strict=True)]
    return torch.stack(cuts).sigmoid()


def _best_cut(scores: Tensor, truth: Tensor) -> Tensor:
    """Return the log-odds from which on one label is answered with yes, see `best_thresholds`."""
    if truth.all() or not truth.any():
        return torch.zeros((), dtype=torch.float64, device="cpu")
    hits, false_alarms = counts_from_the_top(scores, truth)
    f1_scores = 2 * hits / (hits + false_alarms + int(truth.sum()))
    best = int(f1_scores.argmax())
    descending = scores.unique().flip(0)
    if best + 1 == len(descending):  # below all rows, by half of their mean distance
        return descending[best] - (descending[0] - descending[best]) / (2 * len(scores))
    return (descending[best] + descending[best + 1]) / 2


# Sets that miss few labels


def lowered_cuts(logits: Tensor, labels: Tensor, alpha: float, cuts: Tensor) -> Tensor:
    r"""Return the least log-odds (labels,) with which a label is in a row's set, so that on average
    at most a share `alpha` of a row's labels is missed: conformal risk control (Angelopoulos et
    al., 2022, arXiv 2208.02814).

    With the ensemble's log-odds `z_l`, the cuts `t_l` and one shift λ for all labels,

        set       C_λ(x) = {l : z_l >= t_l - λ}            larger λ, larger sets
        loss      L_i(λ) = share of row i's labels that C_λ misses, 0 for a row without labels;
                  never above B = 1
        choice    the smallest λ >= 0 with  n/(n+1) · 1/n Σ_i L_i(λ) + B/(n+1) <= alpha: a label
                  that reaches its own threshold is always in the set

    If a new row is exchangeable with these n, the expected share of its labels that is missed is at
    most alpha, on average over calibration sets and rows: not for every label, and not under
    distribution shift. With too few rows λ is infinite.

    logits: (rows, labels), of rows that neither the model nor the cuts were fitted on
    labels: (rows, labels) bool
    cuts: (labels,), the log-odds from which on each label is predicted
    """
    allowed = float(exact(alpha) * (len(labels) + 1) - 1)
    if allowed < 0:
        return torch.full_like(cuts, -math.inf)

    # The λ from which on each label is in its row's set, in ascending order, with 0 in front.
    needed = cuts.to(logits) - logits
    zero = needed.new_zeros(1)
    shifts, order = torch.cat([zero, needed[labels].clamp(min=0)]).sort(stable=True)

    # What a label's absence adds to the sum of losses.
    row_of_label = labels.nonzero()[:, 0]
    labels_of_row = labels.sum(dim=1)[row_of_label].double()
    weights = torch.cat([zero, 1 / labels_of_row])[order]

    # Losses left over once the labels up to each place are in their sets; ties enter together.
    losses_left = weights.flip(0).cumsum(0).flip(0) - weights
    end = torch.ones(1, dtype=torch.bool, device=shifts.device)
    is_last_of_ties = torch.cat([shifts[1:] > shifts[:-1], end])
    tolerance = 1e-12 * (len(labels) + 1)  # sums of thirds are rounded
    is_enough = is_last_of_ties & (losses_left <= allowed + tolerance)
    return cuts - float(shifts[is_enough][0])


def label_sets(logits: Tensor, lowest: Tensor) -> Tensor:
    """Whether log-odds (rows, labels) reach the lowest of their label; differences were rounded,
    and in doubt they do."""
    return logits >= lowest.to(logits) - ROUNDING


def sets_sentence(alpha: float, sets: Tensor, is_too_few: bool) -> str:
    """Return what is promised for new rows and under which conditions, the size of the sets, and
    whether rows were too few."""
    rows, labels = sets.shape
    note = note_on_missed(math.ceil((rows + 1) * (1 - exact(alpha))), rows)
    if is_too_few:
        note = too_few_rows(alpha, rows)
    sentence = (
        f"On average at most {100 * alpha:.6g} % of a row's labels are missing from its set, over calibration sets "
        f"and rows, if new rows are exchangeable with the {rows} calibration rows. {SHIFT} On the fitting rows sets "
        f"hold {int(sets.sum()) / rows:.3g} of {labels} labels. {note}"
    )
    return sentence.rstrip()


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
        """Return `multi_label_metrics` (with the thresholds of a calibrated model), how much
        members differ, summed over the labels, and what a calibrated model's sets and threshold
        bring."""
        if decided is not None:
            answers = decided.member_logits
        logits = log_odds(answers)
        chosen = logits >= 0
        if decided is not None:
            chosen = decided.chosen_labels

        # Of every model.
        metrics = {}
        right = None
        if labels is not None:
            labels = as_multi_hot(labels, *logits.shape)
            metrics = summarize_labels(logits, labels, chosen)
            right = chosen == labels
        parts = decompose(answers, self.name)
        metrics["mutual_information"] = exact_mean(parts.epistemic.sum(dim=1))
        metrics["disagreement"] = exact_mean(parts.disagreement.mean(dim=1))
        if decided is None:
            return metrics

        # Of a calibrated one.
        sets = decided.prediction_set
        answered = ~decided.abstain
        if sets is not None:
            metrics["set_size"] = exact_mean(sets.sum(dim=1).double())
            if labels is not None:
                metrics["set_missed"] = exact_mean(missed_shares(sets, labels))
        metrics["answered"] = exact_mean(answered.double())
        if right is not None and answered.any():
            metrics["answered_right"] = exact_mean(right.all(dim=1)[answered].double())
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        """Return the sum of the labels' entropies."""
        return decompose(answers, self.name).total.sum(dim=1)

    def of_members(self, member_logits: Tensor, scores: list[dict], settings: Settings | None) -> dict[str, Any]:
        """Return the members' probabilities, and the `thresholds` of the labels."""
        order = [self.classes.index(score["label"]) for score in scores]
        cuts = [0.0] * len(self.classes)
        if settings is not None:
            cuts = [float(value) for value in settings["log_odds"]]
        thresholds = torch.tensor(cuts, dtype=torch.float64).sigmoid()
        return {"thresholds": thresholds[order].tolist(), "members": member_logits.sigmoid()[:, order].tolist()}

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        outcomes = super().outcomes(output, labels, settings, random)
        if labels is None:
            return outcomes
        labels = as_multi_hot(labels, *output.member_logits.shape[::2])

        # Whether any decision on an answered row is wrong.
        answered = outcomes.answered
        logits = log_odds(output.member_logits[answered])  # others may not be numbers
        cuts = torch.tensor([float(value) for value in settings["log_odds"]])
        wrong = (logits >= cuts) != labels[answered]

        # Whether the set misses one of the row's labels, drawn at random.
        missed = None
        if output.prediction_set is not None:
            drawn = draw_one(labels, random).unsqueeze(1)
            missed = (labels & ~output.prediction_set).gather(1, drawn).squeeze(1)
        return outcomes._replace(wrong=wrong.any(dim=1), missed=missed)

    # Calibration

    def fit(self, rows: ValidationRows) -> Fitted:
        """Fit one temperature, a threshold per label, sets that miss few labels, and when to
        abstain.

        The first half of the rows fits the temperature, for the likelihood of every yes and no, and
        the thresholds, for each label's best F1. The second half lowers these to sets that keep the
        promise of `alpha` (see `lowered_cuts`), and fits the target: of rows, whose score is the
        sum of their labels' entropies and which are right if all their decisions are.
        """
        first = _with_multi_hot(rows.first)
        second = _with_multi_hot(rows.second)
        self._check_has_every_label(first.labels.any(dim=0) | second.labels.any(dim=0))

        # The temperature and the thresholds, from the first half.
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

        # The sets, from the second half.
        if rows.alpha is not None:
            logits = log_odds(at_least_float32(second.answers) / temperature)
            lowest = lowered_cuts(logits, second.labels, rows.alpha, thresholds.logit())
            is_too_few = bool(lowest[0] == -math.inf)
            if is_too_few:
                warnings.warn(too_few_rows(rows.alpha, len(logits)), stacklevel=3)
            settings["alpha"] = float(rows.alpha)
            settings["set_log_odds"] = _for_json(lowest)
            sentences.append(sets_sentence(rows.alpha, label_sets(logits, lowest), is_too_few))

        # The threshold, from the second half.
        abstention = None
        if rows.target is not None:
            decision = self.decision(settings)
            output = decision(second.answers)
            wrong = (output.chosen_labels != second.labels).any(dim=1)
            if rows.costs is not None or rows.by_column is not None:
                before = decision(first.answers)
                first_wrong = (before.chosen_labels != first.labels).any(dim=1)
            if rows.by_column is not None:
                abstention = rows.fit_by_column(output.detector_score, ~wrong, ~first_wrong)
                settings |= with_settings(abstention, wrong.numel())
            elif rows.costs is not None:
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
            names = missing[:5]
            if self.classes is not None:
                names = [self.classes[label] for label in names]
            raise ValueError(
                f"no row of data has the label {', '.join(map(repr, names))}, so it has no threshold: add some"
            )


def _with_multi_hot(rows: Rows) -> Rows:
    """Return rows whose labels are (rows, labels) bool."""
    return Rows(rows.answers, as_multi_hot(rows.labels, len(rows.answers), rows.answers.shape[-1]))


def _for_json(values: Tensor) -> list[float | str]:
    """Return numbers as JSON has them: infinite ones are strings."""
    return [value if math.isfinite(value) else str(value) for value in values.tolist()]
