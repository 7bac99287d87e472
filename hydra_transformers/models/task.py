"""What a model predicts: one class for each task, chosen once.

`task_of(model)` and `task_of_config(config)` choose it; nothing else asks a model or config for its task. Tasks other than
single-label classification have files of their own, which ship with the models that need them. The half that only the
package needs (fitting, measuring) lies in `uncertainty/`, one class for each of these.
"""

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

from .ensembling import at_least_float32, entropy_split, log_mean_probability, pool_then_scale


# By name, where the class of a task is.
TASKS = {
    "single_label_classification": "task.SingleLabel",
    "multi_label_classification": "task_multi_label.MultiLabel",
    "regression": "task_regression.Regression",
    "token_classification": "task_tokens.TokenClassification",
    "reward": "task_regression.Reward",
}
YES_OR_NO = "task_multi_label.YesOrNo"  # of models that say nothing of the task
PARTS_OF_UNCERTAINTY = ("uncertainty", "aleatoric", "epistemic")
ROUNDING = 1e-6  # of probabilities; in doubt a class is in the set


@dataclass(frozen=True)
class DecisionOutput:
    """What a calibrated model decides.

    member_logits: (batch, members, classes), with the temperature
    detector_score: (batch,), higher is less sure
    abstain: (batch,) bool, whether the score is above the threshold, or the prediction is not a number
    prediction_set: (batch, classes) bool, the possible classes, all where the prediction is not a number; None without sets
    interval: (batch, outputs, 2), of regression: the lowest and highest value that each output may have; else None
    chosen_labels: (batch, labels) bool, of multi-label classification: the labels that are predicted; else None
    """

    member_logits: Tensor
    detector_score: Tensor
    abstain: Tensor
    prediction_set: Tensor | None = None
    interval: Tensor | None = None
    chosen_labels: Tensor | None = None

    def outputs(self) -> dict[str, Tensor | None]:
        """Return the fields that a model returns beside its logits."""
        return {name: getattr(self, name) for name in ("detector_score", "abstain", "prediction_set", "interval")}


class Task:
    """What a model predicts, and what that means for labels, loss, the ensemble's prediction and decisions.

    Attributes:
        name (`str`): as in `TASKS`, and in a decision's settings.
        title (`str`): for people.
        chooses_one_class (`bool`): whether one class of a row is right, so that its logits have a softmax.
        choice (`str`): how classes are chosen, with a place for their number.
        predicts_numbers (`bool`): whether it predicts numbers, not classes or labels.
        least_classes (`int`): how many classes or outputs a model has at least.
        expected_labels (`str`): the labels that a loss takes, for messages.
        divides_by_items (`bool`): whether Transformers' loss is a sum that is divided by `num_items_in_batch`.
        reads_lists (`bool`): whether a row of a data set has a list of labels.
        has_detector (`bool`): whether the score by which it abstains can be chosen.
        settings_class (`str`): where the class of a decision's settings is; models that are not calibrated ship without it.
    """

    name: str
    title: str
    choice = "one of {} classes"
    chooses_one_class = False
    predicts_numbers = False
    least_classes = 1
    expected_labels: str
    divides_by_items = False
    reads_lists = False
    has_detector = False
    settings_class: str

    def check_config(self, config: PreTrainedConfig) -> None:
        """Raise for a Hydra's config that says how scores become one, see its `aggregate`, and is not of a single score."""
        if config.aggregate is not None:
            load_class("task_regression.check_aggregate")(config)

    # Labels and the loss

    def read_labels(
        self, labels: Any, classes: Sequence[str], words: Sequence[Sequence[str]] | None = None
    ) -> list[Any]:
        """Return the labels of all rows as the loss takes them.

        Args:
            labels (`Labels`): the column of a data set; `LabelLists` where the task `reads_lists`.
            classes (`Sequence[str]`): the model's.
            words (`Sequence[list[str]]`, *optional*): of the rows, for token classification.
        """
        return labels.matched(classes)

    def classes_of_label(self, label: Any) -> Iterable[int]:
        """Return the classes that the label of a row names, by their indices."""
        return [label]

    def accepts(self, labels: Tensor, logits: Tensor) -> bool:
        """Whether the loss of logits (batch, classes) takes these labels."""
        raise NotImplementedError

    def check_labels(self, labels: Tensor, logits: Tensor, config: PreTrainedConfig) -> None:
        """Raise for labels that the loss of logits (batch, classes) does not take."""
        if not self.accepts(labels, logits):
            raise ValueError(
                f"labels are {labels.dtype} of shape {tuple(labels.shape)}, config.problem_type is "
                f"{config.problem_type!r}, which takes {self.expected_labels}: pass these, or set another "
                "config.problem_type"
            )

    def loss(self, loss_function: Callable, labels: Tensor, logits: Tensor, config: Any, **kwargs: Any) -> Tensor:
        """Return the loss of one member, or of the ensemble's prediction."""
        return loss_function(labels, logits, config, **kwargs)

    def mean_loss(
        self, loss_function: Callable, labels: Tensor, predictions: Sequence[Tensor], config: Any, **kwargs: Any
    ) -> Tensor:
        """Return the mean of the losses of several logits (batch, classes); with `num_items_in_batch`, of sums divided by it.

        loss_function: `loss_function(labels, logits, config, **kwargs)`, as Transformers' models have it
        """
        self.check_labels(labels, predictions[0], config)
        losses = [self.loss(loss_function, labels, logits, config, **kwargs) for logits in predictions]
        loss = torch.stack(losses).mean()
        items = kwargs.get("num_items_in_batch")
        if items is None or self.divides_by_items:
            return loss
        # Trainer leaves -100 out of the number, though labels that are not class indices have no ignore index.
        counted = labels.ne(-100).sum()
        items = torch.as_tensor(items, device=labels.device)
        return torch.where(items > 0, loss * counted / items.clamp(min=1), loss)

    # The ensemble's prediction

    def ensemble_logits(self, member_logits: Tensor, config: PreTrainedConfig | None = None) -> Tensor:
        """Return the ensemble's prediction: (batch, members, classes) -> (batch, classes), at least float32.

        config: of the model; a reward model's says how members' scores become one
        """
        raise NotImplementedError

    def scores(self, logits: Tensor) -> Tensor:
        """Return what a prediction shows of the ensemble's logits in float64, such as probabilities: any shape, the same."""
        raise NotImplementedError

    def prediction_fields(
        self, outputs: Mapping[str, Any], names: Any, top_k: int | None, settings: Any
    ) -> dict[str, Any]:
        """Return the fields of a pipeline's prediction for one row, without those of `DecisionSettings.prediction_fields`:
        label, score, uncertainty, aleatoric, epistemic, scores, prediction_set and those of the task.

        Args:
            outputs (`dict`): the model's for one row, with `logits` (1, classes), and `member_logits` (1, members, classes)
                of a Hydra.
            names (`Mapping` or `Sequence`): of the classes, by their indices.
            top_k (`int`, *optional*): how many of the likeliest are in `scores`; None for all.
            settings (`DecisionSettings`, *optional*): of the decision that made these outputs, if there is one.
        """
        raise NotImplementedError

    # The decision

    def decide(self, decision: Any, member_logits: Tensor, member_features: Tensor | None) -> DecisionOutput:
        """Return what a decision of this task decides.

        Args:
            decision (`Decision`): with the settings of `settings_class`.
            member_logits (`Tensor`): (batch, members, classes).
            member_features (`Tensor`, *optional*): (batch, members, dim), where the decision `reads_features`.
        """
        raise NotImplementedError


class Classification(Task):
    """Tasks with a probability for each class or label."""

    def log_probabilities(self, member_logits: Tensor) -> Tensor:
        """Return log-probabilities whose last axis sums to 1: (batch, members, classes) -> (batch, members, ..., outcomes)"""
        return member_logits.log_softmax(dim=-1)

    def scores(self, logits: Tensor) -> Tensor:
        return logits.double().softmax(dim=-1)

    def prediction_fields(
        self, outputs: Mapping[str, Any], names: Any, top_k: int | None, settings: Any
    ) -> dict[str, Any]:
        logits = outputs["logits"][0]
        parts = self.parts_of_uncertainty(outputs)
        # Ranked here: Transformers' own pipelines read the config for every class, which takes a third of the time of an image.
        order = logits.argsort(descending=True, stable=True).tolist()
        values = self.scores(logits).tolist()
        is_in_set = outputs.get("prediction_set")
        prediction_set = None
        if is_in_set is not None:
            prediction_set = [names[place] for place in order if is_in_set[0, place]]
        return {
            "label": names[order[0]],
            "score": values[order[0]],
            **{name: part.sum().item() for name, part in parts.items()},
            "prediction_set": prediction_set,
            "scores": [{"label": names[place], "score": values[place]} for place in order[:top_k]],
        }

    def parts_of_uncertainty(self, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Split one row's entropy, in nats: (1,) each, or (1, labels) where every label has one."""
        members = outputs.get("member_logits")
        if members is None:  # a plain model is one member
            members = outputs["logits"].unsqueeze(1)
        parts = entropy_split(self.log_probabilities(members[:1].double()))
        return dict(zip(PARTS_OF_UNCERTAINTY, parts, strict=True))


# Single-label classification


class SingleLabel(Classification):
    """One class of several is right."""

    name = "single_label_classification"
    title = "single-label classification"
    chooses_one_class = True
    least_classes = 2
    expected_labels = "one class index per row"
    divides_by_items = True
    has_detector = True
    settings_class = "decision_settings.SingleLabelSettings"

    def classes_of_label(self, label: Any) -> Iterable[int]:
        """Return the classes that the label of a row names, by their indices."""
        return [label]

    def accepts(self, labels: Tensor, logits: Tensor) -> bool:
        return labels.numel() == len(logits) and not labels.is_floating_point()

    def ensemble_logits(self, member_logits: Tensor, config: PreTrainedConfig | None = None) -> Tensor:
        """Return the log of the members' mean probability."""
        return log_mean_probability(member_logits)

    def decide(self, decision: Any, member_logits: Tensor, member_features: Tensor | None) -> DecisionOutput:
        settings = decision.settings
        member_logits = pool_then_scale(at_least_float32(member_logits), settings.temperature)
        detector_score = decision.detect(member_logits, member_features)
        log_probabilities = log_mean_probability(member_logits)
        is_not_a_number = log_probabilities.isnan().any(dim=-1)
        abstain = is_not_a_number
        if settings.thresholds is not None:
            thresholds = decision.per_output("thresholds", log_probabilities)
            abstain = abstain | ~(detector_score <= thresholds[log_probabilities.argmax(dim=-1)])
        elif settings.threshold is not None:
            abstain = abstain | decision.above_threshold(detector_score)
        chosen = None
        if settings.sets is not None:
            chosen = prediction_sets(log_probabilities.exp(), settings.sets.threshold) | is_not_a_number.unsqueeze(-1)
        return DecisionOutput(member_logits, detector_score, abstain, chosen)


def prediction_sets(probabilities: Tensor, threshold: float) -> Tensor:
    """Choose the classes that each row may have, bool (batch, classes), by the ensemble's probabilities (batch, classes); at
    least the likeliest."""
    scores = 1 - probabilities
    highest = torch.tensor([float(threshold)], dtype=scores.dtype, device=scores.device)
    chosen = scores <= highest + ROUNDING
    likeliest = nn.functional.one_hot(probabilities.argmax(dim=-1), probabilities.shape[-1]).bool()
    return chosen | (likeliest & ~chosen.any(dim=-1, keepdim=True))


# Which task a model has

LOADED: dict[str | None, Task] = {}  # by name


def load_task(name: str | None) -> Task:
    """Return the task of this name; single-label classification for a name that is none."""
    if name not in LOADED:
        LOADED[name] = load_class(TASKS.get(name, "task.SingleLabel"))()
    return LOADED[name]


def load_class(path: str) -> Any:
    """Import "module.Class" by name: a model ships the files of its own task."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(f".{module}", __package__), name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"this model was saved for another task, without {module}.py: pip install hydra_transformers, and import it "
            "before loading the model"
        ) from error


def task_name_of_config(config: Any) -> str:
    """Return the task of a classifier of whole inputs: one of `TASKS`, or another `problem_type` of Transformers."""
    problem_type = getattr(config, "problem_type", None)
    if problem_type is None and getattr(config, "num_labels", None) == 1:
        problem_type = "regression"  # as in Transformers' loss
    if problem_type == "regression" and getattr(config, "aggregate", None) is not None:
        return "reward"
    return problem_type or "single_label_classification"


def task_of_config(config: Any) -> Task:
    """Return the task of a classifier of whole inputs."""
    name = task_name_of_config(config)
    return LOADED.get(name) or load_task(name)


def classifies_tokens(model: nn.Module) -> bool:
    """Whether a model, or one inside it, gives every token a class; its logits are (batch, tokens, classes)."""
    return any("ForTokenClassification" in type(module).__name__ for module in model.modules())


def config_inside(model: nn.Module) -> Any:
    """Return the config of a model, or of the first model inside it; None where there is none."""
    return next((module.config for module in model.modules() if hasattr(module, "config")), None)


def task_name(model: nn.Module) -> str:
    """Return the name of the task of a model, or of the model inside it."""
    if classifies_tokens(model):
        return "token_classification"
    return task_name_of_config(config_inside(model))


def task_of(model: nn.Module) -> Task:
    """Return the task of a model, or of the model inside it."""
    return load_task(task_name(model))


def task_of_answer(model: nn.Module, outputs: Mapping[str, Any], settings: Any) -> Task:
    """Return the task by which a pipeline shows a model's answer to one row.

    outputs: the model's for one row; settings: of the decision that made them, if there is one
    """
    if settings is not None:
        return load_task(settings.task)
    problem_type = getattr(model.config, "problem_type", None)
    if problem_type in TASKS and problem_type != "single_label_classification":
        return task_of_config(model.config)
    # A plain model may have a single output and no problem type: a probability, unless it is of a text of this call.
    is_probability = outputs["logits"].shape[-1] == 1 and not outputs.get("candidate_labels")
    # Two towers with a bias say yes or no to each text.
    if is_probability or hasattr(model, "logit_bias"):
        return load_class(YES_OR_NO)()
    return load_task("single_label_classification")
