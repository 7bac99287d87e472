"""What a task is: how predictions are read, measured and calibrated. `tasks` lists the tasks there are."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..data.loading import load_if_named
from ..data.prediction import classes_of, config_of
from ..models.decision import Decided, Decision
from .abstention import check_target
from .task_calibration import Fitted, HeldOutRows, collect_rows


# Columns of a prediction and their types, see `Task.columns`.
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


class Task:
    """What a model predicts, and all that depends on it. Made by `task_of(model)`.

    Attributes:
        name (`str`): the task's name, as in configs: "single_label_classification".
        title (`str`): the task for people.
        metrics (`dict`): metric -> (title, "high" or "low" for what is better, "" for neither), in the order of tables.
        columns (`dict`): column -> type of the predictions, in order. Types are Arrow's names, or "strings", "scores",
            "label scores", "intervals", "entities". Models of texts have `truncated` ("bool") as well.
        classes (`list[str]` or `None`): the names of the model's classes.
        aggregate (`str` or `None`): of a reward model, how members' scores become one.
    """

    name: str
    title: str
    metrics: Mapping[str, tuple[str, str]]
    columns: Mapping[str, str] = CLASS_COLUMNS

    def __init__(self, model: nn.Module):
        self.classes = classes_of(model)
        self.aggregate = getattr(config_of(model), "aggregate", None)

    def load(self, data: Any, model: nn.Module) -> Any:
        """Labelled data by its name, folder or file; other data as it is."""
        return load_if_named(data, model, labelled=True)

    def collect(self, model: nn.Module, data: Any, batch_size: int) -> tuple[Tensor, Tensor | None]:
        """The members' outputs (rows, members, ...) for all of `data`, and its labels (rows, ...) or None, on the CPU."""
        return collect_rows(model, data, batch_size)

    def check_target(self, target: Mapping[str, float]) -> None:
        """Raises an error for a target of `calibrate` that this task does not have."""
        check_target(target)

    def fit(self, rows: HeldOutRows) -> Fitted:
        """The settings of a decision, what they promise in sentences, and the threshold."""
        raise NotImplementedError

    def decide(self, decision: Decision, answers: Tensor) -> Decided:
        """What a calibrated model decides on the outputs of `collect`."""
        return decision(answers)

    def measure(
        self, answers: Tensor, labels: Tensor | None, decision_output: Decided | None = None
    ) -> dict[str, float]:
        """The metrics of `answers`; without labels those that need none, without `decision_output` those of the model alone."""
        raise NotImplementedError

    def scores(self, answers: Tensor) -> Tensor:
        """How uncertain each row is, (rows,); higher is less sure. Tells out-of-distribution rows apart."""
        raise NotImplementedError
