"""Single-label classification: one class of several."""

import copy
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Generator, Tensor

from ..model_info import prompts_in
from ..models.decision import Decision
from ..models.ensembling import log_mean_probability
from ..models.task import DecisionOutput
from .abstention import Abstention
from .calibrated_classifier import prompts_of
from .class_promises import ClassAbstention, fit_class_abstention, with_settings
from .conformal import fit_sets, sets_sentence
from .costs import CostTarget, PricedRows, fit_costs
from .decomposition import decompose
from .detectors import Detector, ood_score
from .features import collect_answers
from .inputs import as_labels
from .metrics import exact_mean, sample_values, summarize_classification, summarize_diversity
from .task import Fitted, Metrics, Outcomes, Rows, Settings, TaskFit, ValidationRows
from .temperature import TemperatureScaling, fit_temperature


class SingleLabelFit(TaskFit):
    name = "single_label_classification"
    metrics: ClassVar = {
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

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        return self.summarize(self.row_values(Rows(answers, labels), decided))

    def row_values(
        self, rows: Rows, decided: DecisionOutput | None, score: str | Detector = "msp"
    ) -> dict[str, Tensor]:
        """What `summarize` needs of each row, (rows,) each on the CPU: see `sample_values`; of a calibrated model also
        whether it answers, and with labels whether the set holds the right class and the set's size."""
        answers, labels, features = rows if decided is None else rows._replace(answers=decided.member_logits)
        labels = None if labels is None else as_labels(labels, len(answers), answers.shape[-1])
        values = sample_values(answers, labels, score, features)
        if decided is not None:
            values["answered"] = ~decided.abstain.cpu()
            values["prediction"] = log_mean_probability(decided.member_logits).argmax(dim=-1).cpu()
            if decided.prediction_set is not None and labels is not None:
                sets = decided.prediction_set.cpu()
                values |= {"in_set": sets.gather(1, labels.cpu().unsqueeze(1)).squeeze(1), "set_size": sets.sum(dim=1)}
        return values

    def summarize(self, values: Mapping[str, Tensor]) -> Metrics:
        """The metrics from the values of each row."""
        metrics = summarize_classification(values) if "correct" in values else {}
        metrics |= summarize_diversity(values)
        if "answered" in values:
            answered = values["answered"]
            metrics["answered"] = exact_mean(answered)
            if "correct" in values and answered.any():
                metrics["answered_risk"] = exact_mean(1 - values["correct"][answered])
        if "in_set" in values:
            metrics |= {"set_coverage": exact_mean(values["in_set"]), "set_size": exact_mean(values["set_size"])}
        return metrics

    def scores(self, answers: Tensor) -> Tensor:
        return ood_score(answers)

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        outcomes, sets = super().outcomes(output, labels, settings, random), output.prediction_set
        if labels is None:
            return outcomes
        labels = as_labels(labels, *output.member_logits.shape[::2])
        missed = None if sets is None else ~sets.gather(1, labels.unsqueeze(1)).squeeze(1)
        answered = outcomes.answered  # others may not be numbers
        predictions = decompose(output.member_logits[answered]).prediction
        outcomes = outcomes._replace(wrong=predictions != labels[answered], missed=missed, groups=predictions)
        lost = self.promise_of_lost_rows(settings)
        if lost is None:
            return outcomes
        is_wrong = torch.zeros_like(answered)
        is_wrong[answered] = outcomes.wrong
        return outcomes._replace(lost=is_wrong[labels == lost["label"]])

    @staticmethod
    def promise_of_lost_rows(settings: Settings) -> dict[str, Any] | None:
        """Return what a calibration promised of the true rows of one class, if it did."""
        saved = settings if isinstance(settings, Mapping) else settings.to_dict()
        return (saved.get("validation") or {}).get("lost")

    def of_members(self, member_logits: Tensor, scores: list[dict], settings: Settings | None) -> dict[str, Any]:
        members = member_logits.softmax(dim=-1)
        mean = members.mean(dim=0)
        order = mean.argsort(descending=True, stable=True)
        scores = [{"label": self.classes[index], "score": mean[index].item()} for index in order.tolist()]
        return {"scores": scores, "members": members[:, order].tolist()}

    # Calibration

    def set_detector(self, detector: str | Detector) -> None:
        # A copy, so that a fit leaves the given one as it is.
        self.detector = copy.copy(detector) if isinstance(detector, Detector) else Detector(detector)
        has_towers = any(hasattr(module, "get_image_features") for module in self.model.modules())
        if prompts_in(self.model) is None and has_towers:
            raise ValueError(
                f"model is a {type(self.model).__name__}, whose classes are those of each call's prompts: calibrate a "
                "ZeroShotClassifier of it"
            )

    def collect_rows(self, data: Any, batch_size: int) -> Rows:
        answers, features, labels = collect_answers(self.model, data, batch_size, self.detector.reads_features)
        return Rows(answers, labels, features)

    def fit(self, rows: ValidationRows) -> Fitted:
        """Fit a temperature and a detector on the first half of the rows; its threshold and the sets on the second."""
        first = rows.first
        second = rows.second
        detector = self.detector
        scaling = TemperatureScaling(fit_temperature(first.answers, first.labels))
        sentences = [
            f"The ensemble's prediction has the temperature {scaling.temperature:.3g}; the detector is {detector.description}.",
            rows.sentence,
        ]

        # The detector. Rows that it was fitted on are closer to it than new ones, so that they cannot choose a threshold.
        unseen = first
        if detector.needs_fit and detector.state is None:
            fitted_on = first
            if rows.costs is not None:
                fitted_on, unseen = in_halves(first)
                sentences.append(
                    f"The detector was fitted on {len(fitted_on.labels)} of these rows, and the threshold was chosen on the "
                    f"other {len(unseen.labels)}."
                )
            detector.fit_answers(scaling(fitted_on.answers), fitted_on.features, fitted_on.labels)
        elif detector.needs_fit:
            detector(first.answers[:1], first.features[:1])  # raises its error for the fit of another model
        state = detector.state or {}
        settings = {
            "temperature": scaling.temperature,
            "detector": {"name": detector.name, "by": detector.method.by[0], "settings": detector.settings},
            "sets": None,
            **prompts_of(self.model),
        }

        # When to abstain.
        abstention = None
        if rows.target is not None:
            abstention = self._fit_abstention(rows, self.decision(settings, state), unseen)
            if isinstance(abstention, ClassAbstention):
                settings |= with_settings(abstention, first.answers.shape[-1])
            sentences.append(abstention.sentence)

        # Sets of possible classes.
        if rows.alpha is not None:
            answers = scaling(second.answers)
            threshold = fit_sets(answers, second.labels, rows.alpha)
            saved = threshold if threshold < float("inf") else "inf"
            settings |= {"sets": {"method": "lac", "threshold": saved}, "alpha": float(rows.alpha)}
            sentences.append(sets_sentence(rows.alpha, len(answers), threshold))
        return Fitted(settings, sentences, abstention, state)

    def _fit_abstention(self, rows: ValidationRows, decision: Decision, unseen: Rows) -> Abstention:
        """Find the threshold on the score of a decision that has none yet.

        unseen: those of the first half that its detector was not fitted on
        """
        decided = decision(rows.second.answers, rows.second.features)
        scores = decided.detector_score
        predictions = log_mean_probability(decided.member_logits).argmax(dim=-1)
        labels = rows.second.labels
        if rows.costs is not None:
            before = decision(unseen.answers, unseen.features)
            priced = [
                self._priced(rows.costs, before, unseen.labels),
                self._priced(rows.costs, decided, labels),
            ]
            return fit_costs(rows.costs, rows.confidence, *priced)
        if rows.by_class is None and rows.by_column is None:
            correct = decompose(decided.member_logits).prediction == labels
            return rows.fit_abstention(scores, correct, rows.ood_scores(decision))
        before = decision(rows.first.answers, rows.first.features)
        first_predictions = log_mean_probability(before.member_logits).argmax(dim=-1)
        if rows.by_column is not None:
            return rows.fit_by_column(scores, predictions == labels, first_predictions == rows.first.labels)
        names = self.classes or [str(place) for place in range(rows.first.answers.shape[-1])]
        return fit_class_abstention(
            rows.by_class, rows.confidence, scores, predictions, labels, first_predictions, rows.first.labels, names
        )

    @staticmethod
    def _priced(target: CostTarget, decided: DecisionOutput, labels: Tensor) -> PricedRows:
        """Return rows with the prices of their answers."""
        predictions = log_mean_probability(decided.member_logits).argmax(dim=-1)
        return PricedRows(decided.detector_score, target.of_answers(predictions, labels), predictions != labels)


def in_halves(rows: Rows) -> tuple[Rows, Rows]:
    """Return the first half of some rows, and the other."""
    places = torch.arange(len(rows.answers))
    middle = len(places) // 2
    return rows.take(places[:middle]), rows.take(places[middle:])
