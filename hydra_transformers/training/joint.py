"""Tunes a fused Hydra as a whole, with a teacher: for trunks so deep that merging them costs quality."""

import os
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .finetune import finetune_members
from .losses import Teacher
from .recipes import Recipe, base_recipe


def tune_jointly(
    hydra: PreTrainedModel,
    recipe: Recipe | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    output_dir: str | os.PathLike | None = None,
    teacher: nn.Module | Teacher | None = None,
    **arguments,
) -> PreTrainedModel:
    """Fine-tunes a fused Hydra for a few epochs and returns the result; the one passed in stays as it is.

    All members train at once. Each has a loss of its own, and what they share gets the gradients of all.

    Args:
        hydra: a Hydra of several members, such as `from_pruned_members(members, trunk_layers=11)`.
        teacher: what every member learns beside the labels: the mean probability of another model for the same classes. The
            same members without a trunk, `from_pruned_members(members)`, taught best; any classifier will do, a
            `DeepEnsemble` too. A `Teacher` has a temperature and a share of the labels of its own. None: labels alone.
        recipe: as for `finetune_members`; by default "tune-images" or "tune-texts" as it is: 3 epochs, or 1.
        train_data, validation_data, output_dir, arguments: as for `finetune_members`. The same call resumes.
    """
    if not isinstance(hydra, PreTrainedModel) or getattr(hydra, "num_members", 1) < 2:
        raise TypeError(
            f"hydra is a {type(hydra).__name__} of one member: pass a fused Hydra, or call finetune_members for single models"
        )
    recipe = base_recipe(hydra.config, is_pretrained=False) if recipe is None else recipe
    [tuned] = finetune_members([hydra], recipe, train_data, validation_data, output_dir, teacher=teacher, **arguments)
    return tuned
