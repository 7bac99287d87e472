"""The metrics as `evaluate.Metric` classes, for `add_batch` / `compute`; they need no download.

from hydra_transformers.uncertainty.evaluate_metrics import ClassificationMetrics, OODMetrics
"""

import evaluate
import torch
from datasets import Features, Sequence, Value

from .metrics import classification_metrics, ood_metrics


LABELS = {"references": Value("int64")}


class _Metrics(evaluate.Metric):
    columns: dict

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(self.__doc__, "", Features(self.columns), inputs_description=self.__doc__)


class ClassificationMetrics(_Metrics):
    """`classification_metrics` of member logits (samples, members, classes) and class indices (samples,)."""

    columns = {"predictions": Sequence(Sequence(Value("float64")))} | LABELS  # of each sample (members, classes)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return classification_metrics(torch.tensor(predictions, dtype=torch.float64), references)


class OODMetrics(_Metrics):
    """`ood_metrics` of scores (samples,), higher is more out of distribution, and 1 (out of) or 0 (in distribution)."""

    columns = {"predictions": Value("float64")} | LABELS

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        scores, is_ood = torch.tensor(predictions, dtype=torch.float64), torch.tensor(references)
        return ood_metrics(scores[is_ood == 0], scores[is_ood != 0])
