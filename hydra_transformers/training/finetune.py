"""Fine-tuning members one by one, so that a run that was stopped goes on where it was."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from ..models.auto import described
from .callbacks import describe_trained
from .lora import is_peft_model
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
    one_writer,
    read_record,
    trainer_state,
    wait_for_writer,
)
from .trainer import DivergedError, FiniteTrainer


# Arguments that are set in another way here, and in which.
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
    **training_arguments,
) -> list[PreTrainedModel]:
    """Fine-tunes each member by itself (paper, 4.3) and returns the fine-tuned members; those passed in stay as they are.

    Args:
        members: the pruned members, of one backbone or of several; plain models of Transformers; a `PeftModel` each, of
            which the adapter trains and is saved; or baselines around a model, such as a `BatchEnsemble`.
        recipe: a `Recipe`, or the name of one; None for `default_recipe`, and a line says what that chose.
        train_data, validation_data: the rows to train on and to validate by, as `Trainer` takes them; both are needed.
        output_dir: needed; gets one folder per member, `member-0`, `member-1`, ..., from which the member can be loaded with
            `from_pretrained`. Below it lies one run folder per learning rate.
        seed: member i trains with `seed + i`: its own order of the data and its own dropout.
        data_seed: where the order of the data shall have a seed apart, `data_seed + i`.
        learning_rates: peak learning rates to choose from by validation, "grid" for the recipe's; by default the
            recipe's single `learning_rate`.
        compute_metrics: as in `Trainer`; must return the recipe's metric. By default `compute_accuracy`.
        data_collator, processing_class: as in `Trainer`; without them rows are stacked, and those of tokens filled up to the
            longest of their batch, as everywhere here.
        callbacks: further ones of `Trainer`, beside the recipe's.
        progress: whether to say how far it is: a line for each validation and, on a terminal, a bar for each training.
        training_arguments: arguments of `TrainingArguments` that win over the recipe's.

    Call it again with the same arguments and it goes on where it was: finished members are loaded, an interrupted one
    resumes from its last checkpoint. A folder that holds another fine-tuning, or that another process writes into, is
    refused; data are recognised by their number of rows and the values of some of them. The checkpoints of a finished run are
    deleted. Works under `accelerate launch` and `torchrun`.

    A learning rate at which the loss or the weights stop being finite numbers is given up; where none is left, a
    `DivergedError` is raised and nothing is marked as finished.
    """
    _check_inputs(members, recipe, train_data, validation_data, output_dir, training_arguments)
    recipe = recipe_for(recipe, described(members[0]), train_data)
    # By itself a bar would go by Transformers' verbosity.
    training_arguments = {"disable_tqdm": not progress} | training_arguments
    process = recipe.training_arguments(output_dir, **training_arguments)
    if data_collator is None and processing_class is None:
        data_collator = partial(collate, padding=padding_of(members[0]) or 0, classes=classes_of(members[0]))
    if compute_metrics is None and recipe.metric == "accuracy":
        compute_metrics = compute_accuracy
    job = _Job(
        recipe,
        _learning_rates(recipe, learning_rates),
        {
            "train_dataset": train_data,
            "eval_dataset": validation_data,
            "data_collator": data_collator,
            "processing_class": processing_class,
            "compute_metrics": compute_metrics,
        },
        list(callbacks),
        is_told=progress and process.should_save,
    )
    finished, order = [], seed if data_seed is None else data_seed
    with one_writer(Path(output_dir), process):
        on_writer(process, lambda: claim_members(Path(output_dir), len(members)))
        known_data = on_writer(process, lambda: job.fingerprints(process))
        job.say(f"recipe {recipe.name}: {recipe.summary(process)}")
        for index, member in enumerate(members):
            folder = Path(output_dir) / f"member-{index}"
            arguments = training_arguments | {"seed": seed + index, "data_seed": order + index}
            # Trainer then complains about a missing metric at the first validation already.
            arguments |= {"metric_for_best_model": recipe.metric, "greater_is_better": recipe.greater_is_better}
            _finetune_member(member, folder, arguments, job, known_data)
            finished.append(load_member(member, folder))
    return finished


@dataclass(frozen=True)
class _Job:
    """All that the members' trainings have in common.

    options: arguments of `Trainer`
    is_told: whether this process says how far it is
    """

    recipe: Recipe
    learning_rates: list[float]
    options: dict[str, Any]
    callbacks: list[TrainerCallback]
    is_told: bool

    def say(self, line: str) -> None:
        if self.is_told:
            print(line, flush=True)

    def fingerprints(self, process: TrainingArguments) -> dict[str, Any]:
        in_worker = process.dataloader_num_workers > 0
        sets = {"train_data": self.options["train_dataset"], "validation_data": self.options["eval_dataset"]}
        return {name: fingerprint_of_data(each, in_worker) for name, each in sets.items()}


def compute_accuracy(prediction: Any) -> dict[str, float]:
    """`Trainer(compute_metrics=compute_accuracy)`: the share of right answers of the logits (samples, classes); NaN where
    one of them is NaN, which is no answer."""
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
        "output_dir": (output_dir, "a folder for the members, from which an interrupted call goes on"),
        "validation_data": (validation_data, "a validation set, by which members are chosen and reported"),
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


# One member


def _finetune_member(
    member: PreTrainedModel, folder: Path, arguments: dict, job: _Job, known_data: dict | None
) -> None:
    """Trains with every learning rate and leaves the best in `folder`; `known_data` is there in processes that write."""
    recipe = job.recipe
    process = recipe.training_arguments(folder, **arguments)

    def claim_folder() -> None:
        claim(folder, identity_of(member, recipe, job.learning_rates, arguments, process) | known_data)

    on_writer(process, claim_folder)
    if (folder / FINISHED).exists():
        job.say(f"{folder.name}: already finished")
        return

    results, diverged = {}, {}
    for rate in job.learning_rates:
        try:
            results[rate] = _run(member, folder / f"lr-{rate}", arguments | {"learning_rate": rate}, job)
        except DivergedError as error:
            diverged[rate] = str(error)
            job.say(f"{folder.name}, learning rate {rate:g}: diverged, {error}")
    if not results:
        reasons = "; ".join(f"{reason} at learning rate {rate:g}" for rate, reason in diverged.items())
        raise DivergedError(
            f"the training of {folder} diverged ({reasons}): pass lower learning_rates and another output_dir, or look for "
            "values in the data that are not finite"
        )
    best = max(results, key=lambda rate: _goodness(results[rate], recipe))
    if process.should_save:
        load_member(member, folder / f"lr-{best}").save_pretrained(folder)
        record = {"learning_rate": best, "validation": results, "diverged": diverged}
        _mark_finished(folder, record)
    wait_for_writer(process)
    value = results[best][f"eval_{recipe.metric}"]
    job.say(f"{folder.name}: finished, validation {recipe.metric} {value:.4f} at learning rate {best:g}")


def _run(member: PreTrainedModel, folder: Path, arguments: dict, job: _Job) -> dict[str, float]:
    """Trains a copy of the member in `folder`, from its last checkpoint if there is one; its validation metrics."""
    if (folder / FINISHED).exists():
        return read_record(folder / FINISHED)
    recipe = job.recipe
    process = recipe.training_arguments(folder, **arguments)
    trainer = _train(member, recipe, folder, process, job)
    metrics = {name: value for name, value in trainer.evaluate().items() if isinstance(value, (int, float))}
    chosen_by = f"eval_{recipe.metric}"
    if chosen_by not in metrics:
        raise ValueError(
            f"validation gave {', '.join(metrics)} but no {chosen_by}, which {recipe.name} chooses by: return "
            f"{recipe.metric!r} from compute_metrics, and labels from the dataset"
        )
    if not math.isfinite(metrics[chosen_by]):
        raise DivergedError(f"{chosen_by} is {metrics[chosen_by]} after the last step")
    trainer.save_model(os.fspath(folder))
    if process.should_save:
        _mark_finished(folder, metrics)
    wait_for_writer(process)
    return metrics


def _mark_finished(folder: Path, record: dict[str, Any]) -> None:
    """The last thing that is written; checkpoints are of no use then."""
    write_atomically(folder / FINISHED, json.dumps(record, indent=2))
    for checkpoint in folder.rglob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def _train(member: PreTrainedModel, recipe: Recipe, folder: Path, process: TrainingArguments, job: _Job) -> Trainer:
    """A Trainer whose model has been trained to the end."""
    about = f"{folder.parent.name}, learning rate {process.learning_rate:g}"
    trainer_of = partial(
        FiniteTrainer, args=process, compute_loss_func=recipe.loss() if recipe.label_smoothing else None, **job.options
    )
    checkpoint = last_checkpoint(folder, process.world_size)
    if checkpoint is not None and has_ended(trainer_state(checkpoint)):
        # Trainer would take one step more if it resumed here.
        best = trainer_state(checkpoint)["best_model_checkpoint"]
        chosen = folder / Path(best).name if recipe.keep_best and best else checkpoint
        job.say(f"{about}: trained before, {chosen.name}")
        return trainer_of(model=load_member(member, chosen))

    if checkpoint is not None:
        check_can_resume(checkpoint, process)
    model = copy.deepcopy(member)
    trainer = trainer_of(
        model=model,
        callbacks=[*recipe.callbacks(), *job.callbacks],
        classifier_factor=recipe.classifier_factor,
        name=about if job.is_told else None,
    )
    job.say(f"{about}: {describe_trained(model) if checkpoint is None else f'going on from {checkpoint.name}'}")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_state()
    return trainer


def _goodness(metrics: dict[str, float], recipe: Recipe) -> tuple[float, float]:
    """Orders runs by the recipe's metric, and by the loss where that is equal."""
    value, loss = metrics[f"eval_{recipe.metric}"], metrics.get("eval_loss", 0.0)
    return (value if recipe.greater_is_better else -value, -loss)
