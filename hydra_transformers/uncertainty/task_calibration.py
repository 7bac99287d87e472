"""What the fits of all tasks have in common: held-out rows go in, settings of a decision come out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..models.task_decisions import TaskDecision
from .abstention import Abstention, check_target
from .features import collect_answers


class Rows(NamedTuple):
    """Answers (rows, members, outputs) and labels with the rows in their first dimension, on the CPU."""

    answers: Tensor
    labels: Tensor


@dataclass(frozen=True)
class HeldOutRows:
    """What a task's decision is fitted on.

    task: its name in the settings of the decision
    first, second: random halves of the data; promises are made from the second, which nothing else may be fitted on
    ood: answers to rows from elsewhere, or None
    target, confidence, alpha: as given to `calibrate`, and checked there
    classes: the names of the model's classes or labels, or None
    aggregate: of the model's config
    """

    task: str
    first: Rows
    second: Rows
    ood: Tensor | None
    target: Mapping[str, float] | None
    confidence: float | None
    alpha: float | None
    classes: list[str] | None = None
    aggregate: str | None = None

    def complete(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The settings of a decision, with empty places for what is the same for all tasks."""
        return {"task": self.task, "dtype": None, "state": {}, "digests": None, "sentences": [], **settings}

    def unfinished(self, decision_class: type[TaskDecision], settings: Mapping[str, Any]) -> TaskDecision:
        """The decision as fitted so far, to try on rows."""
        return decision_class(self.complete(settings), 0)


@dataclass(frozen=True)
class Fitted:
    """The result of a task's fit: the settings of its decision, what they promise, and the threshold if there is one."""

    settings: dict[str, Any]
    sentences: list[str]
    abstention: Abstention | None = None


def collect_rows(model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
    """The members' answers (rows, members, outputs) to all of data, and its labels or None."""
    answers, _, labels = collect_answers(model, data, batch_size, with_features=False)
    return answers, labels


class TaskFit(NamedTuple):
    """How `calibrate` fits the decision of a task.

    fit: from held-out rows to settings
    check_target: refuses a target that the task does not have, before anything is read
    collect: reads all answers and labels; both are then split by rows, `answers[numbers]`
    """

    fit: Callable[[HeldOutRows], Fitted]
    check_target: Callable[[Mapping[str, float]], Any] = check_target
    collect: Callable[[nn.Module, Any, int], tuple[Any, Any]] = collect_rows


@dataclass(frozen=True)
class TaskCalibration:
    """The result of `calibrate` for a task that does not choose one class.

    model: the calibrated model: the Hydra itself, or a `CalibratedClassifier` around another model
    settings: of the decision; which there are depends on the task
    abstention: the threshold, with its effect and promise; None without a target
    rows: of the two halves of the data
    sentences: what was fitted on what, and what it promises
    """

    model: nn.Module
    settings: dict[str, Any]
    abstention: Abstention | None
    rows: tuple[int, int]
    sentences: list[str]

    def __str__(self) -> str:
        return "\n".join(self.sentences)
