"""Fine-tunes members one by one, or one per process; an interrupted run resumes."""

import copy
import json
import math
import os
import shutil
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from .._io.access import in_one_line
from .._io.files import write_atomically
from .._io.processes import apart, from_first_process, raise_everywhere, rank_and_world_size
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


logger = logging.get_logger(__name__)

# What several processes divide among them.
DIVISIONS = ("members", "batches")
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
    divide: str = "members",
    **training_arguments: Any,
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
        divide: what several processes (`torchrun`, `accelerate launch`) divide among them. "members": each trains some of the
            members by itself, with the results of a single process. "batches": all train every member together, by DDP or
            as accelerate is configured; a step then has the rows of all processes.
        training_arguments: arguments of `TrainingArguments` that override the recipe's.

    Call it again with the same arguments to resume: finished members are loaded, an interrupted one goes on from its last
    checkpoint. A folder that holds another fine-tuning, or that another process writes into, is refused; any number of processes
    may load a finished one at once. Data are recognised by their number of rows and the values of some of them. The checkpoints
    of a finished run are deleted. If a member fails in one of several processes, the others finish theirs; then all of them
    raise an error that names it.

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
    are_divided = _are_members_divided(divide, process)
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
    is_verbose, own_device = progress and process.should_save, process.device if are_divided else None
    fine_tuning = _FineTuning(recipe, rates, options, list(callbacks), is_verbose, own_device)

    def fingerprints() -> dict[str, Any]:
        in_worker = process.dataloader_num_workers > 0
        sets = {"train_data": train_data, "validation_data": validation_data}
        found = {name: fingerprint_of_data(each, in_worker) for name, each in sets.items()}
        found["teacher"] = None if teacher is None else teacher.identity()
        found["ends_after"] = next((each.share for each in callbacks if isinstance(each, EndAfter)), None)
        return found

    folders = [Path(output_dir) / f"member-{index}" for index in range(len(members))]
    moved = nullcontext() if teacher is None else teacher.moved_to(process.device)
    with only_one_run(Path(output_dir), process, len(members)), moved:
        on_writer(process, lambda: claim_members(Path(output_dir), len(members)))
        data = on_writer(process, fingerprints)
        data = from_first_process(data) if are_divided else data
        fine_tuning.say(f"recipe {recipe.name}: {recipe.summary(process)}")

        def finetune(index: int) -> None:
            seeds = {"seed": seed + index, "data_seed": (seed if data_seed is None else data_seed) + index}
            # With these, Trainer notices a missing metric at the first validation.
            best = {"metric_for_best_model": recipe.metric, "greater_is_better": recipe.greater_is_better}
            fine_tuning.finetune(members[index], folders[index], training_arguments | seeds | best, data)

        if are_divided:
            _each_process_its_own(finetune, folders, fine_tuning)
        else:
            for index in range(len(members)):
                finetune(index)
        return [load_member(member, folder) for member, folder in zip(members, folders, strict=True)]


@dataclass(frozen=True)
class _FineTuning:
    """Trains members with one recipe.

    trainer_options: arguments of `Trainer`
    is_verbose: whether this process prints how far it is
    own_device: where this process trains its own members; None where all processes train together, or there is one
    """

    recipe: Recipe
    learning_rates: list[float]
    trainer_options: dict[str, Any]
    callbacks: list[TrainerCallback]
    is_verbose: bool
    own_device: torch.device | None = None

    def say(self, line: str) -> None:
        if self.is_verbose:
            print(line, flush=True)

    def say_result(self, folder: Path) -> None:
        record, metric = read_record(folder / FINISHED), self.recipe.metric
        rate = record["learning_rate"]
        value = record["validation"][str(rate)][f"eval_{metric}"]
        self.say(f"{folder.name}: finished, validation {metric} {value:.4f} at learning rate {rate:g}")

    def process(self, folder: Path, arguments: dict) -> TrainingArguments:
        process = self.recipe.training_arguments(folder, **arguments)
        if self.own_device is not None and process.device.type == "cuda":
            # A single process would take the first GPU, and all others for nn.DataParallel.
            torch.cuda.set_device(self.own_device)
            process._n_gpu, process.__dict__["_setup_devices"] = 1, self.own_device
        return process

    def finetune(self, member: PreTrainedModel, folder: Path, arguments: dict, data: dict | None) -> None:
        """Trains with every learning rate and leaves the best model in `folder`.

        data: fingerprints of the data and of all else that the run depends on, in processes that write
        """
        recipe, process = self.recipe, self.process(folder, arguments)
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
        self.say_result(folder)

    def _run(self, member: PreTrainedModel, folder: Path, arguments: dict) -> dict[str, float]:
        """Trains a copy of the member in `folder`, from its last checkpoint if there is one; its validation metrics."""
        if (folder / FINISHED).exists():
            return read_record(folder / FINISHED)
        process = self.process(folder, arguments)
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
            repetitions=self.recipe.repetitions,
            name=name if self.is_verbose else None,
            **self.trainer_options,
        )
        self.say(f"{name}: {describe_trained(model) if checkpoint is None else f'going on from {checkpoint.name}'}")
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        trainer.save_state()
        return trainer


def _are_members_divided(divide: str, process: TrainingArguments) -> bool:
    """Whether there are several processes that train members apart."""
    if divide not in DIVISIONS:
        raise ValueError(f"divide is {divide!r}: pass {' or '.join(map(repr, DIVISIONS))}")
    if process.world_size == 1 or divide != "members":
        return False
    launched = [
        name for name in ("FSDP", "DEEPSPEED") if os.environ.get(f"ACCELERATE_USE_{name}", "").lower() == "true"
    ]
    if process.fsdp or process.deepspeed or launched:
        raise ValueError(
            "divide is 'members', and FSDP and DeepSpeed spread each member over all processes: pass 'batches'"
        )
    return True


def _each_process_its_own(finetune: Callable[[int], None], folders: Sequence[Path], fine_tuning: _FineTuning) -> None:
    """Every process trains its share of the members by itself. An error is raised in all of them, once they have finished
    theirs: what is finished need not be trained again."""
    rank, world_size = rank_and_world_size()
    fine_tuning.say(f"{len(folders)} members over {world_size} processes")
    if len(folders) < world_size:
        fine_tuning.say(f"{world_size - len(folders)} of them have none: divide batches instead to use all")
    own, error = range(rank, len(folders), world_size), None
    with apart(fine_tuning.own_device):
        try:
            for index in own:
                finetune(index)
        except Exception as found:
            error = found
            if not isinstance(found, (DivergedError, ValueError)) or str(folders[index]) not in str(found):
                error = RuntimeError(
                    f"the training of {folders[index]} failed ({type(found).__name__}: {in_one_line(found)})"
                )
            logger.warning(f"{error} (other processes finish their members first)")
    try:
        raise_everywhere(error)
    except RuntimeError as found:
        if getattr(found, "is_everywhere", False):
            raise
        missing = [folder.name for folder in folders if not (folder / FINISHED).exists()]
        raise RuntimeError(
            f"a process has ended too early (not finished: {', '.join(missing) or 'none'}): see what it printed, and call again "
            "with the same arguments, which continues"
        ) from found
    for index, folder in enumerate(folders):
        if not (folder / FINISHED).exists():
            raise RuntimeError(
                f"{folder} is not to be seen in process {rank}: pass an output_dir that all machines share"
            )
        if index not in own:
            fine_tuning.say_result(folder)


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
