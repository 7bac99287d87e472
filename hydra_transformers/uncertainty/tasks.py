"""The tasks there are. A new one is a file with its class, and a line in `TASKS`."""

from torch import nn

from ..models.task import task_name
from .multi_label import MultiLabelFit
from .regression import RegressionFit
from .rewards import RewardFit
from .single_label import SingleLabelFit
from .task import TaskFit
from .token_classification import TokenFit


TASKS: dict[str, type[TaskFit]] = {
    task.name: task for task in (SingleLabelFit, MultiLabelFit, RegressionFit, TokenFit, RewardFit)
}


def task_fit_of(model: nn.Module) -> TaskFit:
    """Return what the package does with a model's task.

    Args:
        model (`nn.Module`): a Hydra, a classifier of Transformers, a baseline, or a model that contains one.

    Returns:
        `TaskFit`: with its metrics, columns and calibration.
    """
    return TASKS[task_name(model)](model)
