"""Single-label classification: one class of several."""

from torch import Tensor

from ..models.decision import Decided
from .conformal import count_sets, summarize_sets
from .decomposition import decompose
from .detectors import ood_score
from .metrics import classification_metrics, diversity_metrics, exact_mean
from .task import Task


METRICS = {
    "accuracy": ("Accuracy", "high"),
    "brier": ("Brier", "low"),
    "nll": ("NLL", "low"),
    "ece": ("ECE", "low"),
    "aece": ("aECE", "low"),
    "aurc": ("AURC", "low"),
    "mutual_information": ("MI", ""),
    "disagreement": ("DI", ""),
    "answered": ("Answered", ""),
    "answered_risk": ("Wrong of answered", "low"),
    "set_coverage": ("In set", ""),
    "set_size": ("Set size", "low"),
}


class SingleLabelTask(Task):
    name = "single_label_classification"
    title = "single-label classification"
    metrics = METRICS

    def measure(
        self, answers: Tensor, labels: Tensor | None, decision_output: Decided | None = None
    ) -> dict[str, float]:
        answers = answers if decision_output is None else decision_output.member_logits
        metrics = {} if labels is None else classification_metrics(answers, labels)
        metrics |= diversity_metrics(answers)
        if decision_output is None:
            return metrics
        answered, sets = ~decision_output.abstain, decision_output.prediction_set
        metrics["answered"] = exact_mean(answered.double())
        if labels is not None and answered.any():
            wrong = decompose(answers).prediction != labels
            metrics["answered_risk"] = exact_mean(wrong[answered].double())
        if sets is not None:
            metrics["set_size"] = exact_mean(sets.sum(dim=1).double())
            if labels is not None:
                metrics["set_coverage"] = summarize_sets([count_sets(sets, labels)])["coverage"]
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        return ood_score(answers)
