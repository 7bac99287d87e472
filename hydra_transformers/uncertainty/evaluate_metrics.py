"""The metrics as `evaluate.Metric` classes, to be combined with those of others and computed batch
by batch; no download.

from hydra_transformers.uncertainty.evaluate_metrics import ClassificationMetrics, DiversityMetrics,
OODMetrics
"""

import evaluate
import torch
from datasets import Features, Sequence, Value

from .metrics import classification_metrics, diversity_metrics, ood_metrics


LABELS = {"references": Value("int64")}
MEMBER_LOGITS = {"predictions": Sequence(Sequence(Value("float64")))}  # of each sample (members, classes)


class _Metrics(evaluate.Metric):
    columns: dict

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(self.__doc__, "", Features(self.columns), inputs_description=self.__doc__)


class ClassificationMetrics(_Metrics):
    """Computes `classification_metrics` of member logits (samples, members, classes) and class
    indices (samples,)."""

    columns = MEMBER_LOGITS | LABELS

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return classification_metrics(torch.tensor(predictions, dtype=torch.float64), references)


class DiversityMetrics(_Metrics):
    """Computes `diversity_metrics` of member logits (samples, members, classes); the class indices
    (samples,) are not read."""

    columns = MEMBER_LOGITS | LABELS

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return diversity_metrics(torch.tensor(predictions, dtype=torch.float64))


class OODMetrics(_Metrics):
    """Computes `ood_metrics` of scores (samples,), higher is more out of distribution, and 1 (out
    of) or 0 (in distribution)."""

    columns = {"predictions": Value("float64")} | LABELS

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        scores = torch.tensor(predictions, dtype=torch.float64)
        is_ood = torch.tensor(references)
        return ood_metrics(scores[is_ood == 0], scores[is_ood != 0])
