"""Chooses a learning rate on validation data: one member is fine-tuned at each."""

import json
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import TrainingArguments
from transformers.utils import logging

from .._io.files import write_atomically
from .._io.processes import on_one_process
from .._io.records import check_settings, read_settings
from .recipes import Recipe
from .trainer import DivergedError


logger = logging.get_logger(f"transformers.{__name__}")

TRAININGS = "learning-rates"  # a folder for each rate, until one is chosen
CHOICE = "learning-rates.json"  # what each reached, and which was chosen


class Validation(NamedTuple):
    """A tuned member on the validation data.

    The higher the better, by the first number and among equals by the second.

    metrics: all that was measured, by name
    """

    score: float
    minus_loss: float
    metrics: dict[str, float]


def validation_of(metrics: Mapping[str, float], arguments: TrainingArguments) -> Validation:
    """Return how good a model is, by the metric that its training names, else by accuracy, else by
    the loss.

    metrics: as `Trainer.evaluate` returns them
    """
    measured = {
        name.removeprefix("eval_"): float(value)
        for name, value in metrics.items()
        if not name.endswith(("runtime", "per_second", "epoch"))
    }
    named = arguments.metric_for_best_model
    if named is None:
        has_accuracy = "accuracy" in measured
        named = "accuracy" if has_accuracy else "loss"
    named = named.removeprefix("eval_")
    if named not in measured:
        raise ValueError(
            f"metric_for_best_model is {named!r}, which the validation has not: it has {', '.join(sorted(measured))}"
        )
    is_higher_better = arguments.greater_is_better
    if is_higher_better is None:
        is_higher_better = not named.endswith("loss")
    score = measured[named]
    if not is_higher_better:
        score = -score
    return Validation(score, -measured.get("loss", 0.0), measured)


def rates_to_try(
    learning_rates: Sequence[float] | str, recipe: Recipe, training_arguments: Mapping[str, Any]
) -> list[float]:
    """Return the learning rates to choose from.

    Raise where there are none, or where one is given besides.
    """
    if isinstance(learning_rates, str):
        if learning_rates != "grid":
            raise ValueError(f'learning_rates is {learning_rates!r}: pass "grid", or a list of numbers')
        if not recipe.learning_rates:
            raise ValueError(
                f'learning_rates is "grid", and the recipe {recipe.name!r} has no grid: pass a list of numbers, or '
                "leave it out"
            )
        learning_rates = recipe.learning_rates
    if "learning_rate" in training_arguments:
        raise ValueError("learning_rate is given beside learning_rates: leave one of them out")
    rates = [float(rate) for rate in learning_rates]
    are_positive = all(math.isfinite(rate) and rate > 0 for rate in rates)
    if not rates or not are_positive or len(set(rates)) < len(rates):
        raise ValueError(f"learning_rates is {learning_rates}: pass positive numbers, each of them once")
    return rates


def choose_learning_rate(
    rates: Sequence[float], output_dir: Path, result: Path, validate: Callable[..., Validation]
) -> float:
    """Return the learning rate at which a member is best on the validation data.

    Its training becomes the folder `result`. A rate at which the training diverges is left out.
    What each reached is written to `learning-rates.json`; called again, the choice is read from
    there, and before that finished trainings are not repeated. Equal scores are decided by the
    lower loss, then by the order of `rates`.

    validate: called with a folder and `learning_rate=`, trains there and measures
    """
    choice = output_dir / CHOICE
    trainings = output_dir / TRAININGS
    if choice.exists():
        check_settings(output_dir, CHOICE, {"learning_rates": list(rates)})
        chosen = read_settings(choice)["chosen"]
    else:
        if result.exists():
            raise ValueError(f"{result} was made without learning_rates: pass another output_dir, or leave them out")
        chosen = _best_of(rates, trainings, choice, validate)
    # The best training is the member's; a call that was stopped here goes on here.
    on_one_process(lambda: _keep(trainings, _folder_of(trainings, chosen), result))
    return chosen


def _best_of(rates: Sequence[float], trainings: Path, choice: Path, validate: Callable[..., Validation]) -> float:
    """Train at each rate, write what each reached, and return the best."""
    found: dict[float, Validation] = {}
    diverged = {}
    for rate in rates:
        try:
            found[rate] = validate(_folder_of(trainings, rate), learning_rate=rate)
        except DivergedError as error:
            diverged[rate] = str(error)
    if not found:
        raise DivergedError(f"the training diverged at each of the learning rates {list(rates)}: pass lower ones")

    # The best by its score, then by its loss; what others reached is kept beside it.
    chosen = max(found, key=lambda rate: found[rate][:2])
    record = {
        "learning_rates": list(rates),
        "chosen": chosen,
        "validation": {f"{rate:g}": validation.metrics for rate, validation in found.items()},
        "diverged": {f"{rate:g}": message for rate, message in diverged.items()},
    }
    on_one_process(lambda: write_atomically(choice, json.dumps(record, indent=1) + "\n"))
    tried = ", ".join(f"{rate:g}" for rate in rates)
    logger.info(f"learning rate {chosen:g} of {tried}: {found[chosen].metrics}")
    return chosen


def _folder_of(trainings: Path, rate: float) -> Path:
    return trainings / f"{rate:g}"


def _keep(trainings: Path, best: Path, result: Path) -> None:
    if best.exists() and not result.exists():
        os.replace(best, result)
    shutil.rmtree(trainings, ignore_errors=True)
