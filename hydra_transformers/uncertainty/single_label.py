"""Single-label classification: one class of several."""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..data.loading import load_if_named
from ..data.prediction import config_of, zero_shot_in
from ..models.decision import DecisionOutput
from .calibrated_classifier import prompts_of
from .conformal import ConformalSets, check_method, count_sets, summarize_sets
from .decomposition import decompose
from .detectors import Detector, detector_by_name, ood_score
from .features import collect_answers
from .inputs import as_labels
from .metrics import classification_metrics, diversity_metrics, exact_mean
from .task import Fitted, Metrics, Outcomes, Rows, Task, ValidationRows
from .temperature import TemperatureScaling, fit_temperature


class SingleLabelTask(Task):
    name = "single_label_classification"
    title = "single-label classification"
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
        answers = answers if decided is None else decided.member_logits
        metrics = {} if labels is None else classification_metrics(answers, labels)
        metrics |= diversity_metrics(answers)
        if decided is None:
            return metrics
        answered, sets = ~decided.abstain, decided.prediction_set
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

    def outcomes(
        self, output: Any, labels: Tensor | None, settings: Mapping[str, Any], random: torch.Generator
    ) -> Outcomes:
        outcomes, sets = super().outcomes(output, labels, settings, random), output.prediction_set
        if labels is None:
            return outcomes
        labels = as_labels(labels, *output.member_logits.shape[::2])
        missed = None if sets is None else ~sets.gather(1, labels.unsqueeze(1)).squeeze(1)
        wrong = decompose(output.member_logits).prediction != labels
        return outcomes._replace(wrong=wrong[outcomes.answered], missed=missed)

    # Calibration

    def set_options(
        self, detector: str | Detector, train_data: Any, sets: str, temperature: bool, batch_size: int
    ) -> None:
        if isinstance(detector, Detector):  # a new one, so that a fit leaves the given one as it is
            self.detector = detector_by_name(detector.name, by=detector.by, **detector.settings)
        else:
            self.detector = detector_by_name(detector)
        zero_shot = zero_shot_in(self.model)
        if zero_shot is None and any(hasattr(module, "get_image_features") for module in self.model.modules()):
            raise ValueError(
                f"model is a {type(self.model).__name__}, whose classes are those of each call's prompts: calibrate a "
                "ZeroShotClassifier of it"
            )
        num_classes = getattr(config_of(self.model), "num_labels", None)
        check_method(sets, num_classes if zero_shot is None else len(zero_shot.text_features))
        if train_data is not None and not self.detector.needs_fit:
            raise ValueError(f"train_data is for detectors that learn, {self.detector.name} does not: leave it out")
        self.train_data, self.batch_size = load_if_named(train_data, self.model, split="train"), batch_size
        self.sets, self.scales = sets, temperature

    def collect_rows(self, data: Any, batch_size: int) -> Rows:
        answers, features, labels = collect_answers(self.model, data, batch_size, self.detector.reads_features)
        return Rows(answers, labels, features)

    def fit(self, rows: ValidationRows) -> Fitted:
        """A temperature and a detector on the first half of the rows; its threshold and the sets on the second."""
        first, second, detector = rows.first, rows.second, self.detector
        scaling = TemperatureScaling(fit_temperature(first.answers, first.labels) if self.scales else 1.0)
        if detector.needs_fit and self.train_data is not None:
            detector.fit(scaling.wrap(self.model), self.train_data, self.batch_size)
        elif detector.needs_fit:
            detector.fit_answers(scaling(first.answers), first.features, first.labels)
        settings = {
            "temperature": scaling.temperature,
            "detector": {"name": detector.name, "by": detector.by, "settings": detector.score_settings},
            "sets": None,
            **prompts_of(self.model),
        }
        state, abstention, sets = detector.state or {}, None, None
        sentences = [
            f"The ensemble's prediction has the temperature {scaling.temperature:.3g}; the detector is {detector.description}.",
            rows.sentence,
        ]
        scaled = scaling(second.answers)
        if rows.target is not None:
            decision = self.decision(settings, state)
            scores = decision(second.answers, second.features).detector_score
            correct = decompose(scaled).prediction == second.labels
            abstention = rows.fit_abstention(scores, correct, rows.ood_scores(decision))
            sentences.append(abstention.sentence)
        if rows.alpha is not None:
            sets = ConformalSets.fit(scaled, second.labels, rows.alpha, self.sets)
            threshold = sets.threshold if sets.threshold < float("inf") else "inf"
            settings |= {"sets": {"method": sets.method, "threshold": threshold}, "alpha": sets.alpha}
            sentences.append(sets.sentence)
        return Fitted(settings, sentences, abstention, sets, state)
