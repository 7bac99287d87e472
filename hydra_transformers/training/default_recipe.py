"""The recipe where none is named: ours for images or texts, with a length that fits the data and an early end."""

import math
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from ..models.auto import AUTO_CLASSES, CLASSIFIERS, auto_class_of
from .recipes import RECIPES, Recipe


ROWS_TRIED = 50_000  # about as many as the recipes' epochs were tried with
MOST_EPOCHS = 30
LEAST_PATIENCE = 3


def epochs_for(rows: int, epochs_tried: float) -> int:
    """Passes over a training set of `rows` rows, where `epochs_tried` are right for 50,000.

    The steps grow with the square root of the rows: small sets are seen more often, large ones less, 1 to 30 times.

        >>> [epochs_for(rows, epochs_tried=8) for rows in (500, 5_000, 50_000, 500_000, 5_000_000)]
        [30, 25, 8, 3, 1]
    """
    if rows < 1:
        raise ValueError(f"rows is {rows}: pass at least 1")
    return min(MOST_EPOCHS, max(1, round(epochs_tried * math.sqrt(ROWS_TRIED / rows))))


def default_recipe(
    config: PreTrainedConfig, train_dataset: Any, is_pretrained: bool = False, epochs: int | None = None
) -> Recipe:
    """How to fine-tune on a data set where nobody says how.

    As "finetune-images" and so on, but for as many epochs as `epochs_for` gives; it ends early where validation accuracy has
    not risen for a third of them (at least 3), and keeps the weights that validated best.

    Args:
        config: of the model: whether it reads images or texts. Sounds train as images do, without the transforms of these;
            that was not tried.
        train_dataset: its number of rows counts.
        is_pretrained: whether it is a pre-trained model with a new classifier, and no member of a Hydra that was pruned.
        epochs: where the number of passes is known, at most so many.
    """
    named = RECIPES[base_recipe(config, is_pretrained)]
    if epochs is None:
        if not hasattr(train_dataset, "__len__"):
            raise ValueError(
                f"train_dataset is a {type(train_dataset).__name__} of unknown length, by which epochs are chosen: pass a recipe"
            )
        epochs = epochs_for(len(train_dataset), named.epochs)
    patience = max(LEAST_PATIENCE, math.ceil(epochs / 3))
    return replace(
        named,
        name=f"default {named.name}",
        train_transforms=() if hasattr(config, "num_mel_bins") else named.train_transforms,
        epochs=epochs,
        early_stopping_patience=patience if patience < epochs else None,
        keep_best=True,
    )


def base_recipe(config: PreTrainedConfig, is_pretrained: bool) -> str:
    """The name of the recipe that the default one starts from."""
    is_given_a_classifier = is_pretrained and config.model_type in CLASSIFIERS
    auto_class = AUTO_CLASSES[CLASSIFIERS[config.model_type]] if is_given_a_classifier else auto_class_of(config)
    if "ZeroShot" in auto_class:
        raise ValueError(f"a {config.model_type} has no classifier to train, and no default recipe: pass a recipe")
    reads = "texts" if auto_class == "AutoModelForSequenceClassification" else "images"
    return f"{'finetune' if is_pretrained else 'tune'}-{reads}"


def recipe_of_length(
    name: str | None,
    config: PreTrainedConfig,
    train_data: Any,
    is_pretrained: bool = False,
    epochs: int | None = None,
    max_steps: int | None = None,
) -> Recipe:
    """The recipe of that name, by default the one that fits the data, for another number of epochs or steps where one is
    given; then the warm-up keeps its share."""
    if name is None:
        recipe = default_recipe(config, train_data, is_pretrained, epochs)
        return recipe if max_steps is None else replace(recipe, max_steps=max_steps, epochs=None)
    recipe = RECIPES[name]
    if epochs is None and max_steps is None:
        return recipe
    warmup = recipe.warmup_steps if recipe.warmup_steps < 1 else recipe.warmup_steps / recipe.max_steps
    return replace(recipe, max_steps=max_steps, epochs=epochs, warmup_steps=warmup)
