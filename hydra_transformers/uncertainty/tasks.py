"""The tasks there are. A new one is a file with its class, and a line in `TASKS`."""

from torch import nn

from ..data.prediction import classifies_tokens, config_of, problem_type_of
from .label_decisions import MultiLabelTask
from .regression import RegressionTask
from .rewards import RewardTask
from .single_label import SingleLabelTask
from .tagging import TokenTask
from .task import Task


TASKS: dict[str, type[Task]] = {
    each.name: each for each in (SingleLabelTask, MultiLabelTask, RegressionTask, TokenTask, RewardTask)
}


def task_of(model: nn.Module) -> Task:
    """The task of a model, by its class and config.

    Args:
        model (`nn.Module`): a Hydra, a classifier of Transformers, a baseline, or a model that contains one.

    Returns:
        The `Task` with its metrics, columns and calibration.

    Example:

        task = task_of(hydra)
        answers, labels = task.collect(hydra, data, batch_size=32)
        task.measure(answers, labels)
    """
    config = config_of(model)
    problem_type = problem_type_of(model)
    if problem_type is None and getattr(config, "num_labels", None) == 1:
        problem_type = "regression"  # as in Transformers' loss
    if classifies_tokens(model):
        name = "token_classification"
    elif problem_type == "regression" and getattr(config, "aggregate", None) is not None:
        name = "reward"
    else:
        name = problem_type or "single_label_classification"
    return TASKS[name](model)
