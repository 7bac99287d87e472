"""The defaults of `finetune`. docs/fine-tuning.md has the measurements behind them."""

import math
from typing import TYPE_CHECKING

from transformers import TrainingArguments


if TYPE_CHECKING:
    from ..data.loading import PreparedData

RUNS = 2
MEMBERS = 3
TEXT_KINDS = ("text", "words")

LEAST_EPOCHS = 3
MOST_EPOCHS = 12
ROWS_READ_OF_TEXTS = 80_000  # by all epochs together

# The learning rate of the last layer. Of images it grows with the square root of the rows of a
# step, however many steps there are; of texts and audio it falls with the square root of the steps.
RATE_OF_IMAGES_FOR_256_ROWS = 1e-4
RATE_FOR_500_STEPS = {"text": 2e-4, "words": 2e-4, "audio": 1e-4}
LOWEST_RATE = 2e-5
HIGHEST_RATE = 2e-4
RATE_OF_CLASSIFIERS = 3e-3  # of those that choose one class
RATE_OF_OTHER_HEADS = 1e-3

MIXING_OF_IMAGES = 0.75

# Members of one run have all but one layer of twelve in common, so that they cost about as much as
# one model.
TRUNK = 11 / 12
MERGED = 0.75  # of the layers of plain runs, when they are fused
SHARED_BY_RUNS = ("embeddings",)  # behind the trunk each run keeps its own norms and MLPs: the same work, and better


def epochs_for(rows: int, kind: str = "image") -> int:
    """Return how often to pass over a training set: 3 to 12 times, fewer for more rows.

    Args:
        rows: Of the training split.
        kind: As `PreparedData` has it. Texts need fewer epochs than images.

    >>> [epochs_for(rows) for rows in (500, 50_000, 100_000, 500_000)]
    [12, 9, 6, 3]
    >>> [epochs_for(rows, "text") for rows in (500, 7_500, 20_000, 500_000)]
    [12, 11, 4, 3]
    """
    epochs = 9 * (50_000 / rows) ** 0.5
    if kind in TEXT_KINDS:
        epochs = ROWS_READ_OF_TEXTS / rows
    return min(MOST_EPOCHS, max(LEAST_EPOCHS, round(epochs)))


def learning_rate_for(arguments: TrainingArguments, train: "PreparedData") -> float:
    """Return the peak learning rate of the last layer.

    Of images it goes by the rows of a step, of other data by the number of steps.
    """
    rows_per_step = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    if train.kind == "image":
        rate = RATE_OF_IMAGES_FOR_256_ROWS * (rows_per_step / 256) ** 0.5
    else:
        steps = math.ceil(arguments.num_train_epochs * math.ceil(len(train) / rows_per_step))
        if arguments.max_steps > 0:
            steps = arguments.max_steps
        rate = RATE_FOR_500_STEPS[train.kind] * (500 / max(1, steps)) ** 0.5
    return min(HIGHEST_RATE, max(LOWEST_RATE, rate))


def classifier_rate_for(task: str) -> float:
    """Return the peak learning rate of a new classifier, or of another head."""
    if task == "single_label_classification":
        return RATE_OF_CLASSIFIERS
    return RATE_OF_OTHER_HEADS


def mixing_for(kind: str, problem_type: str | None) -> float:
    """Return the share of the steps in which inputs are mixed."""
    if kind != "image" or problem_type == "regression":
        return 0.0
    return MIXING_OF_IMAGES
