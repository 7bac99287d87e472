"""Names the task of a model."""

from torch import nn

from .prediction import classifies_tokens, config_of, problem_type_of


ONE_CLASS, SEVERAL_LABELS, REGRESSION, TOKENS = "one class", "several labels", "regression", "tokens"
REWARDS = "rewards"  # or rerankers: regression with one output, whose config says how members are put together


def task_of_model(model: nn.Module) -> str:
    """The task by its name above, from the model's class and config."""
    if classifies_tokens(model):
        return TOKENS
    problem_type, config = problem_type_of(model), config_of(model)
    if problem_type is None and getattr(config, "num_labels", None) == 1:
        problem_type = "regression"  # as in Transformers' loss
    if problem_type == "regression" and getattr(config, "aggregate", None) is not None:
        return REWARDS
    tasks = {"multi_label_classification": SEVERAL_LABELS, "regression": REGRESSION}
    return tasks.get(problem_type, ONE_CLASS)
