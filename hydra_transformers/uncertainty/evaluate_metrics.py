"""The metrics as `evaluate.Metric` classes, for `add_batch` / `compute` and `evaluate.combine`; they need no download.

Each batch is reduced to a few numbers per sample before it is stored, so the logits are never held. This module needs
`evaluate`, which the rest of the package does not:

    from hydra_transformers.uncertainty.evaluate_metrics import ClassificationMetrics, DiversityMetrics, OODMetrics
"""

from typing import Any

import torch
from torch import Tensor


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


PREDICTIONS = (
    "\n    predictions: member logits, (samples, members, classes)\n    references: class indices, (samples,)\n"
)


def _info(description: str, inputs: str, features: dict[str, Any]) -> evaluate.MetricInfo:
    return evaluate.MetricInfo(
        description=description, citation="", inputs_description=inputs, features=Features(features)
    )


class _MemberMetrics(evaluate.Metric):
    """Stores `names` of the values per sample."""

    names: tuple[str, ...]

    def add_batch(self, *, predictions: Any = None, references: Any = None, **kwargs: Any) -> None:
        """Reduce a batch of member logits (batch, members, classes), and labels (batch,) where needed, and store the result."""
        member_logits, labels = as_member_logits(predictions), None
        if "correct" in self.names:
            labels = as_labels(references, len(member_logits), member_logits.shape[-1])
            kwargs["references"] = labels.cpu().numpy()
        values = sample_values(member_logits, labels)
        rows = torch.stack([values[name] for name in self.names], dim=1)
        super().add_batch(predictions=rows.numpy(), **kwargs)

    def add(self, *, prediction: Any = None, reference: Any = None, **kwargs: Any) -> None:
        """Store one sample: member logits (members, classes), and its label where needed."""
        self.add_batch(predictions=as_tensor(prediction).unsqueeze(0), references=[reference], **kwargs)

    def values(self, predictions: list) -> dict[str, Tensor]:
        columns = torch.tensor(predictions, dtype=torch.float64, device="cpu").unbind(dim=1)
        return dict(zip(self.names, columns, strict=True))


class ClassificationMetrics(_MemberMetrics):
    """accuracy, brier, nll, ece, aece and aurc, as `classification_metrics` defines them."""

    names = UNCERTAINTY_VALUES + LABELLED_VALUES

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": Sequence(Value("float64")), "references": Value("int64")}
        return _info("Accuracy, calibration and selective prediction of an ensemble.", PREDICTIONS, columns)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        return summarize_classification(self.values(predictions))


class DiversityMetrics(_MemberMetrics):
    """mutual_information and disagreement, as `diversity_metrics` defines them; labels are not needed."""

    names = UNCERTAINTY_VALUES

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": Sequence(Value("float64"))}
        return _info("How much the members of an ensemble differ.", PREDICTIONS, columns)

    def _compute(self, predictions: list) -> dict[str, float]:
        return summarize_diversity(self.values(predictions))


class OODMetrics(evaluate.Metric):
    """auroc, aupr and fpr95, as `ood_metrics` defines them."""

    def _info(self) -> evaluate.MetricInfo:
        inputs = "\n    predictions: OOD scores, (samples,), higher is more out of distribution\n    references: 1 out of, 0 in distribution\n"
        columns = {"predictions": Value("float64"), "references": Value("int64")}
        return _info("How well scores separate out-of-distribution samples.", inputs, columns)

    def _compute(self, predictions: list, references: list) -> dict[str, float]:
        scores = torch.tensor(predictions, dtype=torch.float64, device="cpu")
        is_ood = torch.tensor(references, device="cpu")
        if not ((is_ood == 0) | (is_ood == 1)).all():
            raise ValueError("references must be 1 (out of distribution) or 0 (in distribution)")
        return ood_metrics(scores[is_ood == 0], scores[is_ood == 1])
