"""Tunes a fused Hydra as a whole, with a teacher: for trunks so deep that merging them costs quality."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from ..fusion import number_of_layers, saved_tower_configs, trunk_depth
from ..models.auto import AutoHydra, config_of
from .finetune import finetune_members
from .from_pretrained import finetune_from_pretrained
from .losses import Teacher
from .recipes import Recipe
from .recipes import recipe as recipe_named


if TYPE_CHECKING:
    from ..models.auto import HydraModel


def tune_jointly(
    hydra: PreTrainedModel,
    recipe: Recipe | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    output_dir: str | os.PathLike | None = None,
    teacher: nn.Module | Teacher | None = None,
    **arguments: Any,
) -> "HydraModel":
    """Fine-tunes a fused Hydra for a few epochs and returns the result; the one passed in stays as it is.

    All members train at once. Each has a loss of its own, and what they share gets the gradients of all.

    Args:
        hydra: a Hydra of several members, such as `from_pruned_members(members, trunk_layers=11)`.
        teacher: what every member learns beside the labels: the mean probability of another model for the same classes. The
            same members without a trunk, `from_pruned_members(members)`, taught best; any classifier will do, a
            `DeepEnsemble` too. A `Teacher` has a temperature and a share of the labels of its own. None: labels alone.
        recipe: as for `finetune_members`; by default "tune-images" or "tune-texts", with epochs by the number of rows (3 or 1
            for about 50,000) and early stopping.
        train_data, validation_data, output_dir, arguments: as for `finetune_members`. The same call resumes.
    """
    if not isinstance(hydra, PreTrainedModel) or getattr(hydra, "num_members", 1) < 2:
        raise TypeError(
            f"hydra is a {type(hydra).__name__} of one member: pass a fused Hydra, or call finetune_members for single models"
        )
    [tuned] = finetune_members([hydra], recipe, train_data, validation_data, output_dir, teacher=teacher, **arguments)
    return tuned


def hydra_from_pretrained(
    pretrained: PreTrainedModel | str | os.PathLike,
    num_members: int = 3,
    recipe: Recipe | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    output_dir: str | os.PathLike | None = None,
    *,
    trainings: float | None = None,
    classifiers: int | None = None,
    trunk_layers: int | float = 0.75,
    tuning_recipe: Recipe | str | None = None,
    class_names: Sequence[str] | None = None,
    seed: int = 0,
    **arguments: Any,
) -> "HydraModel":
    """From a pre-trained model to a Hydra in one call, the way that was best on images: fine-tune several times, fuse with most
    layers merged, and tune the Hydra as a whole with its own members unmerged as teacher.

    Args:
        pretrained, num_members, recipe, class_names, classifiers, seed: as for `finetune_from_pretrained`.
        trainings: as there. 6 for 3 members was best: each is the mean of two fine-tunings. None: one for each member.
        trunk_layers: how many layers are merged, or which share, as for `AutoHydra.from_pruned_members`. 11 of 12 layers were as
            good as 9, and cheaper to run than one model.
        tuning_recipe: of the joint tuning, as for `tune_jointly`.
        output_dir: gets the fine-tunings in `finetuned` and the Hydra in `hydra/member-0`. The same call resumes.
        train_data, validation_data, arguments: as for `finetune_members`; for all trainings. One class per row.
    """
    if output_dir is None:
        raise ValueError("output_dir is None: pass a folder for the trainings, where an interrupted call resumes")
    if num_members < 2:
        raise ValueError(f"num_members is {num_members}: pass at least 2, one member is no ensemble")
    if "problem_type" in arguments:
        raise ValueError(
            "problem_type is passed, and a teacher is for one class per row: call finetune_from_pretrained"
        )
    config = pretrained.config if isinstance(pretrained, PreTrainedModel) else config_of(pretrained)
    layers = min(map(number_of_layers, saved_tower_configs(config).values()))
    if not 0 < trunk_depth(trunk_layers, layers) <= layers:
        raise ValueError(f"trunk_layers is {trunk_layers}, of {layers} layers: pass a whole number from 1 to {layers}")
    tuning_recipe = recipe_named(tuning_recipe) if isinstance(tuning_recipe, str) else tuning_recipe
    given = {"train_data": train_data, "validation_data": validation_data, "seed": seed, **arguments}
    folder = Path(output_dir)
    members = finetune_from_pretrained(
        pretrained,
        num_members,
        recipe,
        output_dir=folder / "finetuned",
        class_names=class_names,
        trainings=trainings,
        classifiers=classifiers,
        **given,
    )
    hydra, teacher = (AutoHydra.from_pruned_members(members, trunk_layers=depth) for depth in (trunk_layers, 0))
    return tune_jointly(hydra, tuning_recipe, output_dir=folder / "hydra", teacher=teacher, **given)
