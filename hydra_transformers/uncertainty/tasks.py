"""The tasks there are. A new one is a file with its class, and a line in `TASKS`."""

from torch import nn

from ..models.task import task_name
from .multi_label import MultiLabelTask
from .regression import RegressionTask
from .rewards import RewardTask
from .single_label import SingleLabelTask
from .task import Task
from .token_classification import TokenTask


TASKS: dict[str, type[Task]] = {
    task.name: task for task in (SingleLabelTask, MultiLabelTask, RegressionTask, TokenTask, RewardTask)
}


def task_of(model: nn.Module) -> Task:
    """The task of a model, by its class and config.

    Args:
        model (`nn.Module`): a Hydra, a classifier of Transformers, a baseline, or a model that contains one.

    Returns:
        `Task`: with its metrics, columns and calibration.
    """
    return TASKS[task_name(model)](model)
