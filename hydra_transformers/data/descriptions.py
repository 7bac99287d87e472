"""Says in sentences what a training was given: rows, columns, task and classes."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from ..models.task import load_task


if TYPE_CHECKING:
    from .loading import PreparedData

MOST_NAMES = 5
ROWS_PER_CLASS = 5


def describe_training_data(
    splits: Sequence["PreparedData"], class_names: Sequence[str], problem_type: str | None
) -> list[str]:
    """Return what a model is fine-tuned on, one sentence a line.

    Args:
        splits (`Sequence[PreparedData]`): The training rows first, then those for validation and
            test.
        class_names (`Sequence[str]`): The classes of the model.
        problem_type (`str`, *optional*): As `classes_in` names it.

    Returns:
        `list[str]`: The rows of each split, the columns, the task and its classes.
    """
    rows = [split.notes[0] for split in splits]
    labels = list(chain.from_iterable(split.labels for split in splits))
    return [*rows, *splits[0].notes[1:], *_describe_task(labels, class_names, problem_type)]


def _describe_task(labels: Sequence[Any], class_names: Sequence[str], problem_type: str | None) -> list[str]:
    """Return the task with its classes or numbers, and the classes that no row has."""
    if problem_type == "regression":
        return [f"task: regression, of numbers from {min(labels):g} to {max(labels):g}"]

    counted = Counter(_classes_of_rows(labels, problem_type))
    counts = {name: counted[place] for place, name in enumerate(class_names)}
    task = load_task(problem_type).choice.format(len(counts))
    sentences = [f"task: {task}: {_frequencies(counts)}"]
    empty = [name for name, count in counts.items() if count == 0]
    if empty:
        named = ", ".join(empty[:MOST_NAMES])
        if len(empty) > MOST_NAMES:
            named += f" and {len(empty) - MOST_NAMES:,} more"
        sentences.append(f"no row has the class {named}")
    return sentences


def _classes_of_rows(labels: Sequence[Any], problem_type: str | None) -> Iterator[int]:
    """Yield the class of each row; of a row with several labels or tags all of them."""
    task = load_task(problem_type)
    for label in labels:
        yield from task.classes_of_label(label)


def _frequencies(counts: Mapping[str, int]) -> str:
    """Return the classes with their counts; of many the rarest and the most frequent one."""
    by_count = sorted(counts, key=lambda name: -counts[name])
    listed = [f"{name} ({counts[name]:,})" for name in by_count]
    if len(listed) <= MOST_NAMES:
        return ", ".join(listed)
    return f"from {listed[-1]} to {listed[0]}"


def describe_few_rows(rows: int, num_classes: int) -> list[str]:
    """Return a sentence where so few rows are trained that a model can hardly learn, else none."""
    enough = ROWS_PER_CLASS * max(2, num_classes)
    if rows >= enough:
        return []
    return [
        f"{rows:,} training rows are very few, have {enough:,} or more: expect little of the model and its metrics"
    ]
