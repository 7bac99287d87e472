"""Fine-tunes members one by one; an interrupted run resumes."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

from .._io.files import write_atomically
from ..data.batches import collate
from ..data.fingerprints import fingerprint_of_data
from ..data.prediction import classes_of, padding_of
from ..data.tasks import ONE_CLASS, task_of_model
from ..models.auto import described
from .callbacks import EndAfter, describe_trained
from .lora import is_peft_model
from .losses import Teacher, TeacherLoss
from .parameter_groups import is_baseline
from .recipes import Recipe, check_learning_rate, recipe_for
from .run_folders import (
    FINISHED,
    check_can_resume,
    claim,
    claim_members,
    has_ended,
    identity_of,
    last_checkpoint,
    load_member,
    on_writer,
    only_one_run,
    read_record,
    trainer_state,
)
from .trainer import DivergedError, FiniteTrainer


# Arguments of Trainer that are refused, and what to pass instead.
REFUSED_ARGUMENTS = {
    "learning_rate": "learning_rates=[...]",
    "label_smoothing_factor": "dataclasses.replace(recipe, label_smoothing=...)",
    "load_best_model_at_end": "dataclasses.replace(recipe, keep_best=...)",
    "metric_for_best_model": "dataclasses.replace(recipe, metric=...)",
    "save_only_model": "save_total_limit=1 to save space, a run goes on from whole checkpoints only",
}


def finetune_members(
    members: Sequence[PreTrainedModel],
    recipe: Recipe | str | None = None,
    train_data: Any = None,
    validation_data: Any = None,
    output_dir: str | os.PathLike | None = None,
    seed: int = 0,
    data_seed: int | None = None,
    learning_rates: str | Sequence[float] | None = None,
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    data_collator: Callable | None = None,
    processing_class: Any = None,
    callbacks: Sequence[TrainerCallback] = (),
    progress: bool = True,
    teacher: nn.Module | Teacher | None = None,
    **training_arguments,
) -> list[PreTrainedModel]:
    """Fine-tunes each member by itself (paper, 4.3) and returns the fine-tuned members; those passed in stay as they are.

    Args:
        members: the pruned members, of one backbone or of several; plain models of Transformers; `PeftModel`s, whose adapters
            are trained and saved; or baselines around a model, such as a `BatchEnsemble`.
        recipe: a `Recipe`, or the name of one; None for `default_recipe`, and a line says which one that is.
        train_data, validation_data: the rows to train on and to validate with, as `Trainer` takes them; both are needed.
        output_dir: needed; gets one folder per member, `member-0`, `member-1`, ..., which `from_pretrained` loads. In it
            lies one run folder per learning rate.
        seed: member i trains with `seed + i`: its own order of the data and its own dropout.
        data_seed: another seed for the order of the data, `data_seed + i`.
        learning_rates: peak learning rates to choose from by validation, "grid" for the recipe's; by default the
            recipe's single `learning_rate`.
        compute_metrics: as in `Trainer`; must return the recipe's metric. By default `compute_accuracy`, and the
            loss for models that do not choose one class.
        data_collator, processing_class: as in `Trainer`; without them rows are stacked, and tokens padded to the longest row
            of their batch.
        callbacks: further ones of `Trainer`, beside the recipe's.
        progress: print a line for each validation and, on a terminal, show a bar for each training.
        teacher: a model from whose answers members learn beside the labels, or a `Teacher` with a temperature and a share of the
            labels of its own.
        training_arguments: arguments of `TrainingArguments` that override the recipe's.

    Call it again with the same arguments to resume: finished members are loaded, an interrupted one goes on from its last
    checkpoint. A folder that holds another fine-tuning, or that another process writes into, is refused; any number of processes
    may load a finished one at once. Data are recognised by their number of rows and the values of some of them. The checkpoints
    of a finished run are deleted. Works under `accelerate launch` and `torchrun`.

    A learning rate is given up when the loss or the weights are no longer finite; if none is left, a `DivergedError` is raised
    and nothing is marked as finished.
    """
    _check_inputs(members, recipe, train_data, validation_data, output_dir, training_arguments)
    if teacher is not None:
        teacher = teacher if isinstance(teacher, Teacher) else Teacher(teacher)
        for member in members:
            teacher.check_teaches(member)
    recipe = recipe_for(recipe, described(members[0]), train_data)
    if compute_metrics is None and recipe.metric == "accuracy":
        if task_of_model(members[0]) == ONE_CLASS:
            compute_metrics = compute_accuracy
        else:
            recipe = replace(recipe, metric="loss", label_smoothing=0.0)  # both are about one class of several
    rates = _learning_rates(recipe, learning_rates)
    # Without this, Transformers' verbosity would decide whether there is a bar.
    training_arguments = {"disable_tqdm": not progress} | training_arguments
    process = recipe.training_arguments(output_dir, **training_arguments)
    if data_collator is None and processing_class is None:
        data_collator = partial(collate, padding=padding_of(members[0]) or 0, classes=classes_of(members[0]))
    options = {
        "train_dataset": train_data,
        "eval_dataset": validation_data,
        "data_collator": data_collator,
        "processing_class": processing_class,
        "compute_metrics": compute_metrics,
        "compute_loss_func": recipe.loss() if recipe.label_smoothing else None,
    }
    if teacher is not None:
        options["compute_loss_func"] = TeacherLoss(teacher, recipe.label_smoothing)
    fine_tuning = _FineTuning(recipe, rates, options, list(callbacks), progress and process.should_save)

    def fingerprints() -> dict[str, Any]:
        in_worker = process.dataloader_num_workers > 0
        sets = {"train_data": train_data, "validation_data": validation_data}
        found = {name: fingerprint_of_data(each, in_worker) for name, each in sets.items()}
        found["teacher"] = None if teacher is None else teacher.identity()
        found["ends_after"] = next((each.share for each in callbacks if isinstance(each, EndAfter)), None)
        return found

    finished, output_dir = [], Path(output_dir)
    with only_one_run(output_dir, process, len(members)):
        on_writer(process, lambda: claim_members(output_dir, len(members)))
        data = on_writer(process, fingerprints)
        fine_tuning.say(f"recipe {recipe.name}: {recipe.summary(process)}")
        for index, member in enumerate(members):
            seeds = {"seed": seed + index, "data_seed": (seed if data_seed is None else data_seed) + index}
            # With these, Trainer notices a missing metric at the first validation.
            best = {"metric_for_best_model": recipe.metric, "greater_is_better": recipe.greater_is_better}
            folder = output_dir / f"member-{index}"
            fine_tuning.finetune(member, folder, training_arguments | seeds | best, data)
            finished.append(load_member(member, folder))
    return finished


@dataclass(frozen=True)
class _FineTuning:
    """Trains members with one recipe.

    trainer_options: arguments of `Trainer`
    is_verbose: whether this process prints how far it is
    """

    recipe: Recipe
    learning_rates: list[float]
    trainer_options: dict[str, Any]
    callbacks: list[TrainerCallback]
    is_verbose: bool

    def say(self, line: str) -> None:
        if self.is_verbose:
            print(line, flush=True)

    def finetune(self, member: PreTrainedModel, folder: Path, arguments: dict, data: dict | None) -> None:
        """Trains with every learning rate and leaves the best model in `folder`.

        data: fingerprints of the data and of all else that the run depends on, in processes that write
        """
        recipe = self.recipe
        process = recipe.training_arguments(folder, **arguments)
        on_writer(
            process,
            lambda: claim(folder, identity_of(member, recipe, self.learning_rates, arguments, process) | data),
        )
        if (folder / FINISHED).exists():
            self.say(f"{folder.name}: already finished")
            return
        results, diverged = {}, {}
        for rate in self.learning_rates:
            try:
                results[rate] = self._run(member, folder / f"lr-{rate}", arguments | {"learning_rate": rate})
            except DivergedError as error:
                diverged[rate] = str(error)
                self.say(f"{folder.name}, learning rate {rate:g}: diverged, {error}")
        if not results:
            reasons = "; ".join(f"{reason} at learning rate {rate:g}" for rate, reason in diverged.items())
            raise DivergedError(
                f"the training of {folder} diverged ({reasons}): pass lower learning_rates and another output_dir, or look for "
                "values in the data that are not finite"
            )
        best = max(results, key=lambda rate: _goodness(results[rate], recipe))

        def save_best() -> None:
            load_member(member, folder / f"lr-{best}").save_pretrained(folder)
            _mark_finished(folder, {"learning_rate": best, "validation": results, "diverged": diverged})

        on_writer(process, save_best)
        value = results[best][f"eval_{recipe.metric}"]
        self.say(f"{folder.name}: finished, validation {recipe.metric} {value:.4f} at learning rate {best:g}")

    def _run(self, member: PreTrainedModel, folder: Path, arguments: dict) -> dict[str, float]:
        """Trains a copy of the member in `folder`, from its last checkpoint if there is one; its validation metrics."""
        if (folder / FINISHED).exists():
            return read_record(folder / FINISHED)
        process = self.recipe.training_arguments(folder, **arguments)
        trainer = self._trained(member, folder, process)
        metrics = {name: value for name, value in trainer.evaluate().items() if isinstance(value, (int, float))}
        chosen_by = f"eval_{self.recipe.metric}"
        if chosen_by not in metrics:
            raise ValueError(
                f"validation gave {', '.join(metrics)} but no {chosen_by}, which {self.recipe.name} chooses by: return "
                f"{self.recipe.metric!r} from compute_metrics, and labels from the dataset"
            )
        if not math.isfinite(metrics[chosen_by]):
            raise DivergedError(f"{chosen_by} is {metrics[chosen_by]} after the last step")
        trainer.save_model(os.fspath(folder))
        on_writer(process, lambda: _mark_finished(folder, metrics))
        return metrics

    def _trained(self, member: PreTrainedModel, folder: Path, process: TrainingArguments) -> Trainer:
        """A Trainer whose model has been trained to the end."""
        name = f"{folder.parent.name}, learning rate {process.learning_rate:g}"
        checkpoint = last_checkpoint(folder, process.world_size)
        if checkpoint is not None and has_ended(trainer_state(checkpoint)):
            # Trainer would take one step more if it resumed here.
            best = trainer_state(checkpoint)["best_model_checkpoint"]
            chosen = folder / Path(best).name if self.recipe.keep_best and best else checkpoint
            self.say(f"{name}: trained before, {chosen.name}")
            return FiniteTrainer(model=load_member(member, chosen), args=process, **self.trainer_options)
        if checkpoint is not None:
            check_can_resume(checkpoint, process)
        model = copy.deepcopy(member)
        trainer = FiniteTrainer(
            model=model,
            args=process,
            callbacks=[*self.recipe.callbacks(), *self.callbacks],
            classifier_factor=self.recipe.classifier_factor,
            name=name if self.is_verbose else None,
            **self.trainer_options,
        )
        self.say(f"{name}: {describe_trained(model) if checkpoint is None else f'going on from {checkpoint.name}'}")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.save_state()
        return trainer


def _mark_finished(folder: Path, record: dict[str, Any]) -> None:
    """Written last; the checkpoints are no longer needed then."""
    write_atomically(folder / FINISHED, json.dumps(record, indent=2))
    for checkpoint in folder.rglob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def _goodness(metrics: dict[str, float], recipe: Recipe) -> tuple[float, float]:
    """Orders runs by the recipe's metric, and by the loss where that is equal."""
    value, loss = metrics[f"eval_{recipe.metric}"], metrics.get("eval_loss", 0.0)
    return (value if recipe.greater_is_better else -value, -loss)


def compute_accuracy(prediction: Any) -> dict[str, float]:
    """`Trainer(compute_metrics=compute_accuracy)`: the share of right answers of the logits (samples, classes); NaN where
    one of them is NaN."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    if np.isnan(logits).any():
        return {"accuracy": math.nan}
    return {"accuracy": float(np.mean(np.argmax(logits, axis=-1) == prediction.label_ids))}


def _learning_rates(recipe: Recipe, learning_rates: str | Sequence[float] | None) -> list[float]:
    if learning_rates is None:
        return [recipe.learning_rate]
    if isinstance(learning_rates, str):
        if learning_rates != "grid":
            raise ValueError(f'learning_rates is {learning_rates!r}: pass "grid", a list of learning rates, or None')
        learning_rates = recipe.learning_rate_grid
    if len(learning_rates) == 0:
        raise ValueError(f"there are no learning rates to choose from: pass a list ({recipe.name} has no grid)")
    return [check_learning_rate("learning_rates", rate) for rate in learning_rates]


def _check_inputs(
    members: Sequence[PreTrainedModel],
    recipe: Recipe | str | None,
    train_data: Any,
    validation_data: Any,
    output_dir: str | os.PathLike | None,
    training_arguments: dict,
) -> None:
    if isinstance(members, nn.Module):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of pruned members")
    if not members:
        raise ValueError("members has no models: pass a list of pruned members")
    for index, member in enumerate(members):
        if is_peft_model(member):
            names = list(member.peft_config)
            if names != ["default"]:  # PEFT saves others in subfolders of their own
                raise ValueError(
                    f'members[{index}] has the adapters {", ".join(names)}: pass one adapter, named "default"'
                )
        elif not isinstance(member, PreTrainedModel) and not is_baseline(member):
            raise TypeError(f"members[{index}] is a {type(member).__name__}: pass Transformers or Hydra models")
    if recipe is None and any(map(is_peft_model, members)):
        raise ValueError(
            "there is no default recipe for members with adapters, which train at other rates: pass a recipe"
        )
    needed = {
        "train_data": (train_data, "the rows to train on"),
        "output_dir": (output_dir, "a folder for the members, where an interrupted call resumes"),
        "validation_data": (validation_data, "a validation set to choose by"),
    }
    for name, (given, what) in needed.items():
        if given is None:
            raise ValueError(f"{name} is None: pass {what}")
    for name, dataset in {"train_data": train_data, "validation_data": validation_data}.items():
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise ValueError(f"{name} has no rows: pass at least one")
    for name, instead in REFUSED_ARGUMENTS.items():
        if name in training_arguments:
            raise ValueError(f"{name} cannot be passed to finetune_members: pass {instead}")
