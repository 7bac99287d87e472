"""`compute_metrics` for the Hugging Face Trainer.

Trainer hands over the logits alone unless it is told otherwise, so that functions written for plain models work; the members
come with `trainer.evaluate(ignore_keys=[])` and `trainer.train(ignore_keys_for_eval=[])`.
"""

import warnings
from typing import Any

from torch import Tensor

from .inputs import as_tensor
from .metrics import classification_metrics, diversity_metrics
from .streaming import UncertaintyAccumulator


def compute_metrics(prediction: Any) -> dict[str, float]:
    """The classification and diversity metrics of an evaluation: `Trainer(..., compute_metrics=compute_metrics)`.

    Trainer's predictions are the tuple (logits, member_logits, ...) with `evaluate(ignore_keys=[])`. Without it they are the
    logits alone, which say nothing of the members: the diversity metrics are then left out.
    """
    member_logits, has_members = _member_logits(prediction.predictions)
    metrics = classification_metrics(member_logits, prediction.label_ids)
    if not has_members:
        _warn_of_missing_members()
        return metrics
    return metrics | diversity_metrics(member_logits)


class StreamingComputeMetrics:
    """`compute_metrics` without holding all logits: for `TrainingArguments(batch_eval_metrics=True)`.

    Trainer calls it once per batch, and with `compute_result=True` on the last one. What an evaluation that failed has left
    is dropped when the next one begins.
    """

    def __init__(self):
        self._accumulator = UncertaintyAccumulator()
        self._evaluation: Any = None

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        evaluation = _running_evaluation()
        if evaluation != self._evaluation:
            self._accumulator = UncertaintyAccumulator()
        self._evaluation = evaluation
        accumulator, self._accumulator = self._accumulator, UncertaintyAccumulator()
        member_logits, has_members = _member_logits(prediction.predictions)
        accumulator.update(member_logits, prediction.label_ids)
        if not compute_result:
            self._accumulator = accumulator
            return {}
        metrics = accumulator.compute()
        if not has_members:
            _warn_of_missing_members()
            del metrics["mutual_information"], metrics["disagreement"]
        return metrics


def _running_evaluation() -> tuple[int, int] | None:
    """What tells one pass over Trainer's data from the next; None outside Trainer.

    Trainer says nothing when an evaluation begins, but its loaders register with Accelerate while they are read. One whose
    reading broke off stays registered, so reading it again adds a second entry.
    """
    try:
        from accelerate.state import GradientState
    except ImportError:
        return None
    loaders = GradientState().dataloader_references
    return None if loaders[-1] is None else (id(loaders[-1]), len(loaders))


def _warn_of_missing_members() -> None:
    warnings.warn(
        "Trainer handed over logits without member_logits, so mutual_information and disagreement are left out: call "
        "trainer.evaluate(ignore_keys=[]) and trainer.train(ignore_keys_for_eval=[])",
        stacklevel=3,
    )


def _member_logits(predictions: Any) -> tuple[Tensor, bool]:
    """(samples, members, classes) among Trainer's predictions, and whether they are the members' own."""
    if not isinstance(predictions, (tuple, list)):
        logits = as_tensor(predictions)
        return (logits.unsqueeze(1), False) if logits.dim() == 2 else (logits, True)
    logits = as_tensor(predictions[0])
    others = [as_tensor(other) for other in predictions[1:] if not isinstance(other, (tuple, list))]
    # Hidden states may come along too: the member logits are those with the logits' rows and classes.
    fitting = [x for x in others if x.dim() == 3 and (x.shape[0], x.shape[2]) == tuple(logits.shape)]
    return (fitting[0], True) if fitting else (logits.unsqueeze(1), False)
