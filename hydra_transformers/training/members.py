"""Fine-tunes pruned members one by one; an interrupted run resumes."""

import copy
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel, PrinterCallback, TrainerCallback, TrainingArguments

from ..data.fingerprints import fingerprint_of_labels, fingerprint_of_tokens, fingerprint_of_weights
from ..data.loading import PreparedData
from ..data.prediction import config_of
from ..models.decision import task_name
from .checkpoints import CHECKPOINTS, check_can_train_in, is_finished, load_member, record_training
from .lora import is_peft_model
from .losses import IGNORED_LABEL, ONE_OF_SEVERAL
from .parameter_groups import is_baseline
from .recipes import Recipe
from .recipes import recipe as recipe_named
from .trainer import HydraTrainer


RECORDED = (
    *("learning_rate", "branch_rate", "classifier_learning_rate", "lr_scheduler_type", "warmup_steps", "optim"),
    *("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "seed"),
    *("weight_decay", "label_smoothing_factor", "class_weights", "max_grad_norm", "bf16", "fp16", "data_seed"),
    *("adam_beta1", "adam_beta2", "adam_epsilon", "optim_args", "lr_scheduler_kwargs"),
)


def finetune_members(
    members: Sequence[PreTrainedModel],
    recipe: Recipe | str | None,
    train_data: Any,
    validation_data: Any,
    output_dir: str | os.PathLike,
    *,
    seed: int = 0,
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    data_collator: Callable | None = None,
    processing_class: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    progress: bool = True,
    **training_arguments: Any,
) -> list[PreTrainedModel]:
    """Fine-tunes each member by itself (paper, 4.3); those passed in stay as they are.

    Call it again with the same arguments to resume: finished members are loaded from their folders, an interrupted one goes on
    from its last checkpoint. Several processes (`torchrun`) train every member together.

    Args:
        members (`Sequence[PreTrainedModel]`):
            Pruned members, of one backbone or of several; plain models of Transformers; `PeftModel`s, whose adapters are
            trained and saved; or baselines around a model, such as a `BatchEnsemble`.
        recipe (`Recipe` or `str`):
            The recipe, or the name of one; `None` for three epochs with the defaults of `HydraTrainingArguments`.
        train_data (`DataLoader`, `Dataset` or `list`), validation_data (`DataLoader`, `Dataset` or `list`):
            The rows to train on and to validate with, as `HydraTrainer` takes them.
        output_dir (`str` or `os.PathLike`):
            Gets one folder per member, `member-0`, `member-1`, ..., which `from_pretrained` loads.
        seed (`int`, defaults to 0):
            Member i trains with `seed + i`: its own order of the data and its own dropout.
        compute_metrics (`Callable`, *optional*):
            As in `Trainer`; by default `compute_accuracy` for models that choose one class. Others are judged by their loss.
        data_collator, processing_class, callbacks (*optional*):
            As in `HydraTrainer`; the recipe's callbacks come first.
        progress (`bool`, defaults to `True`):
            Show Trainer's progress bar.
        training_arguments (*optional*):
            Arguments of `HydraTrainingArguments` that override the recipe's.

    Returns:
        The fine-tuned members, in eval mode.

    Example:

    ```py
    members = draw_members(backbone, circuits=circuits, budget=24)
    tuned = finetune_members(members, "cifar100", train, validation, "members", per_device_train_batch_size=256)
    hydra = AutoHydra.from_pruned_members(tuned)
    ```
    """
    for index, member in enumerate(members):
        if is_peft_model(member) and list(member.peft_config) != ["default"]:  # PEFT saves others in subfolders
            raise ValueError(
                f'members[{index}] has the adapters {", ".join(member.peft_config)}: pass one adapter, named "default"'
            )
    recipe = recipe_named(recipe) if isinstance(recipe, str) else recipe or Recipe("default")
    training_arguments = {"disable_tqdm": not progress} | training_arguments
    if compute_metrics is None and task_name(members[0]) in ONE_OF_SEVERAL:
        compute_metrics = compute_accuracy
    elif compute_metrics is None:  # accuracy and label smoothing are about one class of several
        by_loss = {"metric_for_best_model": "loss", "greater_is_better": False, "label_smoothing_factor": 0.0}
        training_arguments = by_loss | training_arguments
    folders = [Path(output_dir) / f"member-{index}" for index in range(len(members))]
    for folder in folders:
        check_can_train_in(folder)
    result = []
    for index, (member, folder) in enumerate(zip(members, folders, strict=True)):
        seeds = {"seed": seed + index, "data_seed": seed + index}
        arguments = recipe.training_arguments(folder / CHECKPOINTS, **training_arguments | seeds)
        record_training(
            folder, settings_of(member, arguments, {"training": train_data, "validation": validation_data})
        )
        if not is_finished(folder):
            trainer = HydraTrainer(
                copy.deepcopy(member),
                arguments,
                data_collator,
                train_data,
                validation_data,
                processing_class,
                compute_metrics=compute_metrics,
                callbacks=[*recipe.callbacks(), *callbacks],
            )
            if not progress:
                trainer.remove_callback(PrinterCallback)
            train_and_save(trainer, folder)
        result.append(load_member(member, folder).to(member.device))
    return result


def settings_of(model: nn.Module, arguments: TrainingArguments, parts: dict[str, Any]) -> dict[str, Any]:
    """With what an interrupted training has to resume: Trainer would ignore another setting, or mix both."""
    parts = {name: data for name, data in parts.items() if isinstance(data, PreparedData)}
    # Of the weights those of attention: a script that is started again may draw new classifiers, poolers and adapters.
    names = [name for name, _ in model.named_parameters() if "att" in name and "lora_" not in name]
    return {
        **{name: getattr(arguments, name, None) for name in RECORDED},
        "classes": getattr(config_of(model), "id2label", None),
        "starting weights": fingerprint_of_weights(model, () if is_baseline(model) else names),
        "rows": {name: fingerprint_of_labels(data.labels) for name, data in parts.items()},
        "inputs": {name: fingerprint_of_tokens(replace(data, change=None)) for name, data in parts.items()},
    }


def train_and_save(trainer: HydraTrainer, folder: Path) -> None:
    """Trains to the end, and leaves the model in `folder` without its checkpoints, which lie in a folder inside it."""
    checkpoints = folder / CHECKPOINTS
    checkpoints.mkdir(parents=True, exist_ok=True)  # the sign of an unfinished training
    trainer.train_to_end()
    trainer.save_model(os.fspath(folder))
    if trainer.args.should_save:
        shutil.rmtree(checkpoints)
    trainer.accelerator.wait_for_everyone()


def compute_accuracy(prediction: Any) -> dict[str, float]:
    """`Trainer(compute_metrics=compute_accuracy)`: of the logits (samples, classes), or of labelled tokens; NaN where one is NaN.

    Args:
        prediction (`EvalPrediction`): what `Trainer` passes.
    """
    logits, labels = prediction.predictions, prediction.label_ids
    logits = logits[0] if isinstance(logits, tuple) else logits
    if np.isnan(logits).any():
        return {"accuracy": math.nan}
    return {"accuracy": float(np.mean((np.argmax(logits, axis=-1) == labels)[labels != IGNORED_LABEL]))}
