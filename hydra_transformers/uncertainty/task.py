"""What a task is: how predictions are read, measured and calibrated. `tasks` lists the tasks there are."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor, nn

from ..data.loading import load_if_named
from ..model_info import class_names_of
from ..models.decision import Decision, config_settings
from ..models.decision_settings import typed_settings, version_needed
from ..models.task import DecisionOutput, config_inside, load_task
from .abstention import Abstention
from .class_promises import ClassAbstention, ClassTarget, GroupedRows, fit_group_abstention
from .costs import CostTarget
from .features import collect_answers


# Columns of a prediction and their types, see `TaskFit.columns`.
CLASS_COLUMNS = {
    "label": "string",
    "score": "double",
    "uncertainty": "double",
    "aleatoric": "double",
    "epistemic": "double",
    "abstain": "bool",
    "detector": "string",
    "detector_score": "double",
    "threshold": "double",
    "reason": "string",
    "prediction_set": "strings",
    "scores": "scores",
}


Metrics, Settings = dict[str, float], Mapping[str, Any]


class Rows(NamedTuple):
    """Predictions (rows, members, ...), labels (rows, ...) and features (rows, members, dim), on the CPU."""

    answers: Tensor
    labels: Tensor | None
    features: Tensor | None = None

    def take(self, places: Tensor) -> "Rows":
        return Rows(*(None if part is None else part[places] for part in self))


@dataclass(frozen=True)
class ColumnGroups:
    """The groups of validation rows by a column.

    target: what is promised of each
    column: whose values name the groups
    names: of all groups
    first, second: (rows,), the group of each row of the two halves, by its place in `names`
    """

    target: ClassTarget
    column: str
    names: list[str]
    first: Tensor
    second: Tensor


@dataclass(frozen=True)
class ValidationRows:
    """What a decision is fitted on.

    first, second: random halves of the data; promises are made from the second, which nothing else may be fitted on
    ood: out-of-distribution rows, or None
    target, confidence, alpha: as given to `calibrate`, and checked there
    by_class: the target, where it is one by class
    by_column: the target and the groups of the rows, where promises are made by a column
    costs: the target, where it is one of costs
    """

    first: Rows
    second: Rows
    ood: Rows | None
    target: Mapping[str, float] | None
    confidence: float | None
    alpha: float | None
    by_class: ClassTarget | None = None
    costs: CostTarget | None = None
    by_column: ColumnGroups | None = None

    @property
    def counts(self) -> tuple[int, int]:
        return len(self.first.labels), len(self.second.labels)

    @property
    def sentence(self) -> str:
        return (
            f"Of {sum(self.counts)} rows, a random half ({self.counts[0]}) was used for this, and the other half "
            f"({self.counts[1]}) for what follows: promises need rows that nothing else was fitted on."
        )

    def ood_scores(self, decision: Decision) -> Tensor | None:
        """The detector's scores of the out-of-distribution rows."""
        if self.ood is None:
            return None
        return decision(self.ood.answers, self.ood.features).detector_score.flatten()

    def fit_by_column(self, scores: Tensor, correct: Tensor, first_correct: Tensor) -> ClassAbstention:
        """Find a threshold for each group of the column.

        Args:
            scores, correct: (rows,), of the second half.
            first_correct: (rows,), of the first.
        """
        groups = self.by_column
        rows = GroupedRows(scores, groups.second, correct)
        first = GroupedRows(None, groups.first, first_correct)
        return fit_group_abstention(groups.target, self.confidence, rows, first, groups.names, groups.column)

    def fit_abstention(
        self, scores: Tensor, correct: Tensor | None, ood_scores: Tensor | None, unit: str = "rows", **options: Any
    ) -> Abstention:
        """`Abstention.fit` for the target, with an error that says how many rows there are."""
        options = {**self.target, "confidence": self.confidence, "unit": unit} | options
        try:
            return Abstention.fit(scores, correct, ood_scores, **options)
        except ValueError as error:
            raise ValueError(
                f"{error} (fitted on half of data, {len(scores)} {unit}: a promise needs rows that nothing else was fitted on)"
            ) from error


@dataclass(frozen=True)
class Fitted:
    """The result of a task's fit.

    settings: of its decision, without those that every task has, and without the threshold
    sentences: what was fitted, and what it promises
    abstention: the threshold, if there is a target
    state: tensors of the decision
    """

    settings: dict[str, Any]
    sentences: list[str]
    abstention: Abstention | None = None
    state: dict[str, Tensor] = field(default_factory=dict)


class Outcomes(NamedTuple):
    """What a monitor counts of the rows of a batch. Of a row with several labels, entities or outputs one is drawn at random.

    scores, answered: (rows,), the detector's score, and whether the model did not abstain
    wrong: of the answered rows alone, whether the prediction is wrong; None without labels
    missed: whether the set or interval misses the label; None without labels, sets and intervals
    groups: of the answered rows alone, the group by which promises by group count them: the predicted class, or the place
        of a column's value; None where there is none
    lost: with a promise of the true rows of one class, of these alone, whether they are answered as another
    """

    scores: Tensor
    answered: Tensor
    wrong: Tensor | None = None
    missed: Tensor | None = None
    groups: Tensor | None = None
    lost: Tensor | None = None


def draw_one(is_candidate: Tensor, random: Generator) -> Tensor:
    """The place of a random candidate of each row, (rows,); is_candidate: (rows, places) bool"""
    chances = torch.rand(is_candidate.shape, generator=random, device="cpu")
    return chances.masked_fill(~is_candidate, -1.0).argmax(dim=1)


class TaskFit:
    """What the package does with a task: measures predictions, and fits a decision. Made by `task_fit_of(model)`.

    The other half, which ships with models, is a `Task` of `models/task.py`.

    Attributes:
        name (`str`): the task's name, as in `models.task.TASKS`: "single_label_classification".
        title (`str`), has_detector (`bool`), predicts_numbers (`bool`): as of that `Task`.
        metrics (`dict`): metric -> (title, "high" or "low" for what is better, "" for neither), in the order of tables.
        columns (`dict`): column -> type of the predictions, in order. Types are Arrow's names, or "strings", "scores",
            "label scores", "intervals", "entities". Models of texts have `truncated` ("bool") as well.
        model (`nn.Module`), classes (`list[str]` or `None`): whose task it is, and the names of its classes.
        aggregate (`str` or `None`): of a reward model, how members' scores become one.
        guarantees_risk (`bool`): whether a risk is a share, and can have a confidence.
        judges_rows (`bool`): whether a row is right or wrong as a whole, so that it has a price, and groups have risks.
    """

    name: str
    title: str
    metrics: Mapping[str, tuple[str, str]]
    columns: Mapping[str, str] = CLASS_COLUMNS
    guarantees_risk = True
    judges_rows = True
    has_detector: bool
    predicts_numbers: bool

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        task = load_task(cls.name)
        cls.title = task.title
        cls.has_detector = task.has_detector
        cls.predicts_numbers = task.predicts_numbers

    def __init__(self, model: nn.Module):
        self.model, self.classes = model, class_names_of(model)
        self.aggregate = getattr(config_inside(model), "aggregate", None)

    def load(self, data: Any, model: nn.Module) -> Any:
        """Labelled data by its name, folder or file; other data as it is."""
        return load_if_named(data, model, labelled=True)

    def collect(self, model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
        """The members' outputs (rows, members, ...) for all of `data`, and its labels (rows, ...) or None, on the CPU."""
        answers, _, labels = collect_answers(model, data, batch_size, with_features=False)
        return answers, labels

    def decide(self, decision: Decision, answers: Tensor, group: Tensor | None = None) -> DecisionOutput:
        """Return what a calibrated model decides on the outputs of `collect`; group: see `Decision.forward`."""
        return decision(answers, group=group)

    def measure(self, answers: Tensor, labels: Tensor | None, decided: DecisionOutput | None = None) -> Metrics:
        """The metrics of `answers`; without labels those that need none, without `decided` those of the model alone."""
        raise NotImplementedError

    def constant_metric(self, labels: Tensor) -> float:
        """The first metric of predicting the same for every row."""
        return 0.0

    def scores(self, answers: Tensor) -> Tensor:
        """How uncertain each row is, (rows,); higher is less sure. Tells out-of-distribution rows apart."""
        raise NotImplementedError

    def outcomes(self, output: Any, labels: Tensor | None, settings: Settings, random: Generator) -> Outcomes:
        """What a monitor counts of a calibrated model's output on the CPU; settings: of its decision."""
        return Outcomes(output.detector_score, ~output.abstain)

    def of_members(self, member_logits: Tensor, scores: list[dict], settings: Settings | None) -> dict[str, Any]:
        """What is shown of the members beside a prediction and its `scores`; member_logits: (members, outputs)"""
        return {"members": member_logits.tolist()}

    # Calibration

    def set_detector(self, detector: Any) -> None:
        """Takes the detector of `calibrate`, which only single-label models have; others raise an error where one is given."""
        if detector != "msp":
            raise ValueError(f"detector is for single-label classification, this is {self.title}: leave it out")

    def collect_rows(self, data: Any, batch_size: int) -> Rows:
        """`collect`, with what else `fit` reads."""
        return Rows(*self.collect(self.model, data, batch_size))

    def fit(self, rows: ValidationRows) -> Fitted:
        """The settings of a decision, what they promise in sentences, and the threshold."""
        raise NotImplementedError

    def decision(self, settings: Mapping[str, Any], state: Mapping[str, Tensor] | None = None) -> Decision:
        """A decision with these settings and tensors, for the model."""
        state = state or {}
        saved = {
            "task": self.name,
            "config": config_settings(self.model),
            "state": {name: list(tensor.shape) for name, tensor in state.items()},
            "version": version_needed(settings),
        }
        typed = typed_settings({**saved, **settings})
        decision = Decision(typed, sum(weight.numel() for weight in self.model.parameters()))
        for name, tensor in state.items():
            getattr(decision, name).copy_(tensor)
        return decision
