"""Names the task of a model, which everything that fits, judges or shows its answers is chosen by."""

from collections.abc import Collection

from torch import nn

from .prediction import classifies_tokens, config_of, problem_type_of


ONE_CLASS, SEVERAL_LABELS, REGRESSION, TOKENS = "one class", "several labels", "regression", "tokens"
REWARDS = "rewards"  # or rerankers: regression with one output, whose config says how members are put together
WORDS = {
    ONE_CLASS: "choosing one of several classes",
    SEVERAL_LABELS: "multi-label classification",
    REGRESSION: "regression",
    TOKENS: "the classes of tokens",
    REWARDS: "rewards or reranking",
}


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


def check_task(model: nn.Module, name: str, tasks: Collection[str]) -> str:
    """The model's task; refuses one that is not among `tasks`. name: what messages call the model"""
    task = task_of_model(model)
    if task not in tasks:
        known = " or ".join(WORDS[each] for each in tasks)
        raise ValueError(
            f"{name} is made for {WORDS[task]} (problem_type in its config), and this is about {known}: pass another model"
        )
    return task
