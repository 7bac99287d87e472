"""`compute_metrics` for the Hugging Face Trainer."""

from typing import Any

from torch import Tensor

from .inputs import as_tensor
from .metrics import classification_metrics, diversity_metrics
from .streaming import UncertaintyAccumulator


def compute_metrics(prediction: Any) -> dict[str, float]:
    """The classification and diversity metrics of an evaluation: `Trainer(..., compute_metrics=compute_metrics)`.

    Trainer's predictions are the logits (one member), or the tuple (logits, member_logits, ...) where the model returns more.
    """
    member_logits = _member_logits(prediction.predictions)
    return classification_metrics(member_logits, prediction.label_ids) | diversity_metrics(member_logits)


class StreamingComputeMetrics:
    """`compute_metrics` without holding all logits: for `TrainingArguments(batch_eval_metrics=True)`.

    Trainer calls it once per batch, and with `compute_result=True` on the last one.
    """

    def __init__(self):
        self._accumulator = UncertaintyAccumulator()

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        self._accumulator.update(_member_logits(prediction.predictions), prediction.label_ids)
        if not compute_result:
            return {}
        metrics = self._accumulator.compute()
        self._accumulator = UncertaintyAccumulator()
        return metrics


def _member_logits(predictions: Any) -> Tensor:
    """(samples, members, classes) among Trainer's predictions."""
    if not isinstance(predictions, (tuple, list)):
        logits = as_tensor(predictions)
        return logits.unsqueeze(1) if logits.dim() == 2 else logits
    logits = as_tensor(predictions[0])
    others = [as_tensor(other) for other in predictions[1:] if not isinstance(other, (tuple, list))]
    # Hidden states may come along too: the member logits are those with the logits' rows and classes.
    fitting = [x for x in others if x.dim() == 3 and (x.shape[0], x.shape[2]) == tuple(logits.shape)]
    return fitting[0] if fitting else logits.unsqueeze(1)
