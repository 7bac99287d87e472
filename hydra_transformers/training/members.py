"""Fine-tunes pruned members one by one; an interrupted run resumes."""

import copy
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch import nn
from transformers import PreTrainedModel, TrainerCallback, TrainingArguments

from .._io.progress import shows_bars
from ..data.fingerprints import (
    fingerprint_of_labels,
    fingerprint_of_texts,
    fingerprint_of_tokenizer,
    fingerprint_of_weights,
)
from ..data.image_changes import CropAndFlip
from ..data.loading import PreparedData
from ..model_info import is_baseline, is_peft_model
from ..models.task import config_inside, task_name
from .checkpoints import CHECKPOINTS, check_can_train_in, is_finished, load_member, record_training, remove_checkpoints
from .epoch_lines import show_progress
from .learning_rates import Validation, choose_learning_rate, rates_to_try, validation_of
from .losses import IGNORED_LABEL, ONE_OF_SEVERAL, learns_from_pairs
from .recipes import Recipe
from .recipes import recipe as recipe_named
from .trainer import HydraTrainer


# The arguments with which an interrupted training has to resume
RECORDED = (
    # the learning rates and their schedule
    "learning_rate",
    "layer_decay",
    "classifier_learning_rate",
    "lr_scheduler_type",
    "lr_scheduler_kwargs",
    "warmup_steps",
    # the steps
    "num_train_epochs",
    "max_steps",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "seed",
    "data_seed",
    # the loss
    "mixing",
    "label_smoothing_factor",
    "class_weights",
    # the optimizer
    "optim",
    "optim_args",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_epsilon",
    "max_grad_norm",
    "bf16",
    "fp16",
)


DEFAULT = Recipe("default", image_change=CropAndFlip())


def finetune_members(
    members: Sequence[PreTrainedModel],
    recipe: Recipe | str | None,
    train_data: Any,
    validation_data: Any,
    output_dir: str | os.PathLike,
    *,
    seed: int | Sequence[int] = 0,
    data_seed: int | Sequence[int] | None = None,
    learning_rates: Sequence[float] | Literal["grid"] | None = None,
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    data_collator: Callable | None = None,
    processing_class: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    progress: bool = True,
    **training_arguments: Any,
) -> list[PreTrainedModel]:
    """Fine-tune each member by itself (paper, 4.3); those passed in stay as they are.

    Call it again with the same arguments to resume: finished members are loaded from their folders,
    an interrupted one goes on from its last checkpoint. Several processes (`torchrun`) train every
    member together.

    Args:
        members (`Sequence[PreTrainedModel]`):
            Pruned members, of one backbone or of several; plain models of Transformers;
            `PeftModel`s, whose adapters are trained and saved; or baselines around a model, such as
            a `BatchEnsemble`.
        recipe (`Recipe` or `str`):
            The recipe, or the name of one; `None` for three epochs with the defaults of
            `HydraTrainingArguments`, on images that are cropped and flipped at random.
        train_data (`DataLoader`, `Dataset` or `list`), validation_data (`DataLoader`, `Dataset` or
            `list`):
            The rows to train on and to validate with, as `HydraTrainer` takes them.
        output_dir (`str` or `os.PathLike`):
            Gets one folder per member, `member-0`, `member-1`, ..., which `from_pretrained` loads.
        seed (`int` or `Sequence[int]`, defaults to 0):
            Member i trains with `seed + i`, which decides its dropout and other noise; a sequence
            has a seed for each member.
        data_seed (`int` or `Sequence[int]`, *optional*, defaults to `seed`):
            Member i reads the data in the order of `data_seed + i`; a sequence has a seed for each
            member. With `seed=[0, 0, 0], data_seed=[0, 1, 2]` members differ in nothing but the
            order of their data.
        learning_rates (`Sequence[float]` or `"grid"`, *optional*):
            Peak learning rates to choose from; `"grid"` for those of the recipe. The first member
            is tuned at each of them, and all members get the one that was best on the validation
            data (see `choose_learning_rate`).
        compute_metrics (`Callable`, *optional*):
            As in `Trainer`; by default `compute_accuracy` for models that choose one class. Others
            are judged by their loss, such as CLIP, which learns from pairs: rows with
            `pixel_values` and `input_ids`.
        data_collator, processing_class, callbacks (*optional*):
            As in `HydraTrainer`; the recipe's callbacks come first.
        progress (`bool`, defaults to `True`):
            Show Trainer's progress bar; where stderr is no terminal, one line for each epoch.
        training_arguments (*optional*):
            Arguments of `HydraTrainingArguments` that override the recipe's.

    Returns:
        The fine-tuned members, in eval mode.

    Example:

    ```py
    members = draw_members(backbone, circuits=circuits, budget=24)
    batches = {"per_device_train_batch_size": 256}
    tuned = finetune_members(members, "cifar100", train, validation, "members", **batches)
    hydra = AutoHydra.from_pruned_members(tuned)
    ```
    """
    for index, member in enumerate(members):
        if is_peft_model(member) and list(member.peft_config) != ["default"]:  # PEFT saves others in subfolders
            raise ValueError(
                f'members[{index}] has the adapters {", ".join(member.peft_config)}: pass one adapter, named "default"'
            )
    seeds = _seed_of_each(seed, "seed", len(members))
    data_seeds = seeds
    if data_seed is not None:
        data_seeds = _seed_of_each(data_seed, "data_seed", len(members))

    # The recipe: its images, its learning rates, its arguments
    if isinstance(recipe, str):
        recipe = recipe_named(recipe)
    elif recipe is None:
        recipe = DEFAULT
    is_of_images = isinstance(train_data, PreparedData) and train_data.kind == "image"
    if is_of_images and train_data.change is None:
        train_data = replace(train_data, change=recipe.image_change)
    rates = None
    if learning_rates is not None:
        rates = rates_to_try(learning_rates, recipe, training_arguments)
    training_arguments = {"disable_tqdm": not (progress and shows_bars())} | training_arguments
    if validation_data is not None and "eval_strategy" not in recipe.arguments:
        training_arguments = {"eval_strategy": "epoch"} | training_arguments

    # What validation measures: accuracy and label smoothing are about one class of several.
    has_accuracy = task_name(members[0]) in ONE_OF_SEVERAL and not learns_from_pairs(members[0])
    if compute_metrics is None and has_accuracy:
        compute_metrics = compute_accuracy
    elif compute_metrics is None:
        by_loss = {"metric_for_best_model": "loss", "greater_is_better": False, "label_smoothing_factor": 0.0}
        training_arguments = by_loss | training_arguments

    # The trainings, one after the other
    tuning = _Tuning(
        recipe,
        training_arguments,
        {"training": train_data, "validation": validation_data},
        {"data_collator": data_collator, "processing_class": processing_class, "compute_metrics": compute_metrics},
        callbacks,
        progress,
    )
    folders = [Path(output_dir) / f"member-{index}" for index in range(len(members))]
    for folder in folders:
        check_can_train_in(folder)
    seeds_by_member = [{"seed": first, "data_seed": second} for first, second in zip(seeds, data_seeds, strict=True)]
    if rates is not None:
        first = partial(tuning.validate, members[0], **seeds_by_member[0])
        tuning.arguments["learning_rate"] = choose_learning_rate(rates, Path(output_dir), folders[0], first)
    tuned = []
    for member, folder, of_member in zip(members, folders, seeds_by_member, strict=True):
        tuned.append(tuning.tune(member, folder, **of_member))
    return tuned


@dataclass
class _Tuning:
    """The trainings of members that differ in their seeds alone.

    data: the rows for "training" and "validation"
    options: further arguments of `HydraTrainer`
    """

    recipe: Recipe
    arguments: dict[str, Any]
    data: dict[str, Any]
    options: dict[str, Any]
    callbacks: Sequence[TrainerCallback]
    progress: bool

    def tune(self, member: nn.Module, folder: Path, **arguments: Any) -> Any:
        """Fine-tune a copy of `member`, or go on with it, and load the result from `folder`."""
        training = self.recipe.training_arguments(folder / CHECKPOINTS, **self.arguments | arguments)
        settings = settings_of(member, training, self.data)
        training_data = self.data["training"]
        if isinstance(training_data, PreparedData) and training_data.kind == "image":
            settings["image_change"] = _name_of(training_data.change)
        record_training(folder, settings)
        if not is_finished(folder):
            callbacks = [*self.recipe.callbacks(), *self.callbacks]
            train_and_save(self._trainer(copy.deepcopy(member), training, callbacks), folder)
        return load_member(member, folder).to(member.device)

    def validate(self, member: nn.Module, folder: Path, **arguments: Any) -> Validation:
        """Fine-tune a copy of `member` in `folder`, and measure it on the validation data."""
        tuned = self.tune(member, folder, **arguments)
        # Trainer makes its folder at once, and that of checkpoints is the sign of an unfinished
        # training.
        training = self.recipe.training_arguments(folder, **self.arguments | arguments)
        metrics = self._trainer(tuned, training, ()).evaluate()
        return validation_of(metrics, training)

    def _trainer(self, model: nn.Module, training: TrainingArguments, callbacks: Sequence) -> HydraTrainer:
        trainer = HydraTrainer(
            model,
            training,
            train_dataset=self.data["training"],
            eval_dataset=self.data["validation"],
            callbacks=list(callbacks),
            **self.options,
        )
        show_progress(trainer, self.progress)
        return trainer


def _name_of(change: Callable | None) -> str | None:
    """Return what a change of images is called in the record of a training: the same when the
    script is started again."""
    if change is None:
        return None
    if is_dataclass(change):
        return repr(change)
    return getattr(change, "__qualname__", type(change).__qualname__)


def _seed_of_each(seed: int | Sequence[int], name: str, count: int) -> list[int]:
    """Return a seed for each of `count` members."""
    if isinstance(seed, int):
        return [seed + index for index in range(count)]
    if len(seed) != count:
        raise ValueError(f"{name} has {len(seed)} seeds for {count} members: pass one for each, or a number")
    return list(seed)


def settings_of(model: nn.Module, arguments: TrainingArguments, parts: dict[str, Any]) -> dict[str, Any]:
    """Return with what an interrupted training has to resume.

    Trainer itself would ignore another setting, or mix both.
    """
    parts = {name: data for name, data in parts.items() if isinstance(data, PreparedData)}
    texts = {name: data for name, data in parts.items() if data.kind in ("text", "words")}
    # Of the weights those of attention: a script that is started again may draw new classifiers,
    # poolers and adapters. Baselines draw weights there, too.
    names = []
    if not is_baseline(model):
        names = [name for name, _ in model.named_parameters() if "att" in name and "lora_" not in name]

    settings = {name: getattr(arguments, name, None) for name in RECORDED}
    settings["classes"] = getattr(config_inside(model), "id2label", None)
    settings["starting weights"] = fingerprint_of_weights(model, names)
    settings["rows"] = {name: fingerprint_of_labels(data.labels) for name, data in parts.items()}
    settings["texts"] = {name: fingerprint_of_texts(data) for name, data in texts.items()}
    settings["tokenizer"] = {
        name: fingerprint_of_tokenizer(data.processor, data.max_length) for name, data in texts.items()
    }
    return settings


def train_and_save(trainer: HydraTrainer, folder: Path) -> None:
    """Train to the end, and leave the model in `folder`, without the checkpoints that lie in it."""
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)  # the sign of an unfinished training
    trainer.train_to_end()
    trainer.save_model(os.fspath(folder))
    if trainer.args.should_save:
        remove_checkpoints(folder)
    trainer.accelerator.wait_for_everyone()


def compute_accuracy(prediction: Any) -> dict[str, float]:
    """Return the accuracy: `Trainer(compute_metrics=compute_accuracy)`.

    It is that of the logits (samples, classes), or of labelled tokens; NaN where a logit is NaN.

    Args:
        prediction (`EvalPrediction`): What `Trainer` passes.
    """
    logits = prediction.predictions
    labels = prediction.label_ids
    if isinstance(logits, tuple):
        logits = logits[0]
    if np.isnan(logits).any():
        return {"accuracy": math.nan}
    is_right = np.argmax(logits, axis=-1) == labels
    return {"accuracy": float(np.mean(is_right[labels != IGNORED_LABEL]))}
