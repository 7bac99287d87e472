"""The metrics as `evaluate.Metric` classes, for `add_batch` / `compute` and `evaluate.combine`; they need no download.

Each batch is reduced to a few numbers per sample before it is stored, so the logits are never held. This module needs
`evaluate`, which the rest of the package does not:

    from hydra_transformers.uncertainty.evaluate_metrics import ClassificationMetrics, DiversityMetrics, OODMetrics
"""

from typing import Any

import torch


try:
    import evaluate
    from datasets import Features, Sequence, Value
except ImportError as error:
    raise ImportError("the evaluate metrics need evaluate and datasets: pip install evaluate datasets") from error

from .inputs import as_labels, as_member_logits, as_tensor
from .metrics import (
    LABELLED_VALUES,
    UNCERTAINTY_VALUES,
    ood_metrics,
    sample_values,
    summarize_classification,
    summarize_diversity,
)


INPUTS = "predictions: member logits, (samples, members, classes); references: class indices, (samples,)"


class _MemberMetrics(evaluate.Metric):
    """Stores `names` of the values per sample."""

    names: tuple[str, ...]

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": Sequence(Value("float64"))}
        if "correct" in self.names:
            columns["references"] = Value("int64")
        return evaluate.MetricInfo(
            description=self.__doc__, citation="", inputs_description=INPUTS, features=Features(columns)
        )

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Reduces a batch of member logits (batch, members, classes), and labels (batch,) where needed, and stores it."""
        member_logits, labels = as_member_logits(predictions), None
        if "correct" in self.names:
            labels = as_labels(references, len(member_logits), member_logits.shape[-1])
            kwargs["references"] = labels.cpu().numpy()
        values = sample_values(member_logits, labels)
        rows = torch.stack([values[name] for name in self.names], dim=1)
        super().add_batch(predictions=rows.numpy(), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Stores one sample: member logits (members, classes), and its label where needed."""
        self.add_batch(predictions=as_tensor(prediction).unsqueeze(0), references=[reference], **kwargs)

    def _compute(self, predictions: list, references: list | None = None) -> dict[str, float]:
        columns = torch.tensor(predictions, dtype=torch.float64, device="cpu").unbind(dim=1)
        values = dict(zip(self.names, columns, strict=True))
        return summarize_diversity(values) if references is None else summarize_classification(values)


class ClassificationMetrics(_MemberMetrics):
    """accuracy, brier, nll, ece, aece and aurc, as `classification_metrics` defines them."""

    names = UNCERTAINTY_VALUES + LABELLED_VALUES


class DiversityMetrics(_MemberMetrics):
    """mutual_information and disagreement, as `diversity_metrics` defines them; labels are not needed."""

    names = UNCERTAINTY_VALUES


class OODMetrics(evaluate.Metric):
    """auroc, aupr and fpr95, as `ood_metrics` defines them."""

    def _info(self) -> evaluate.MetricInfo:
        inputs = "predictions: OOD scores, (samples,), higher is more out of distribution; references: 1 out of, 0 in distribution"
        columns = Features({"predictions": Value("float64"), "references": Value("int64")})
        return evaluate.MetricInfo(description=self.__doc__, citation="", inputs_description=inputs, features=columns)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        scores = torch.tensor(predictions, dtype=torch.float64, device="cpu")
        is_ood = torch.tensor(references, device="cpu")
        if not ((is_ood == 0) | (is_ood == 1)).all():
            raise ValueError("references must be 1 (out of distribution) or 0 (in distribution)")
        return ood_metrics(scores[is_ood == 0], scores[is_ood == 1])
