"""Fine-tuning members one by one, in run folders that can be picked up again."""

import copy
import io
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from .._io.files import UNFINISHED, parse_json, write_atomically
from .._io.folder_lock import only_writer
from .._io.processes import gather
from ..data.fingerprints import fingerprint_of_data, fingerprint_of_weights
from ..data.prediction import classes_of, collate, padding_of
from ..fusion import tower_configs
from ..models.auto import described
from .callbacks import describe_trained
from .lora import adapter_settings, is_peft_model
from .parameter_groups import is_baseline
from .recipes import Recipe, check_learning_rate, default_recipe
from .recipes import recipe as recipe_by_name
from .trainer import DivergedError, FiniteTrainer, broken_weights_named, check_nothing_is_missing


# A run folder holds RUN from its start and FINISHED as the last thing that is written; MEMBERS, in the folder above, says
# how many members there shall be.
RUN, FINISHED, MEMBERS = "run.json", "finished.json", "members.json"

# Arguments that differ between runs, or on which more depends than Trainer knows.
SETTLED_ELSEWHERE = {
    "learning_rate": "learning_rates=[...]",
    "label_smoothing_factor": "dataclasses.replace(recipe, label_smoothing=...)",
    "load_best_model_at_end": "dataclasses.replace(recipe, keep_best=...)",
    "metric_for_best_model": "dataclasses.replace(recipe, metric=...)",
    "save_only_model": "save_total_limit=1 to save space, a run goes on from whole checkpoints only",
}

# Arguments that change nothing in the weights, so that a run may be picked up with others.
COSMETIC_ARGUMENTS = {
    "dataloader_num_workers",
    "dataloader_pin_memory",
    "disable_tqdm",
    "log_level",
    "logging_first_step",
    "logging_steps",
    "logging_strategy",
    "report_to",
    "run_name",
    "save_total_limit",
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
        recipe: a `Recipe`, or the name of one; None for `default_recipe`, of which a line tells what it is.
        train_data, validation_data: what `Trainer` takes, both needed; `validation_data` is the validation set.
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
    resumes from its last checkpoint. A folder that holds another fine-tuning is refused; data are known again by their
    number of rows and the values of some of them. So is a folder that another process is writing into. The checkpoints of
    a finished run are deleted. Works under `accelerate launch` and `torchrun`.

    A learning rate at which the loss or the weights stop being finite numbers is given up; where none is left, a
    `DivergedError` is raised and nothing is marked as finished.
    """
    _check_inputs(members, train_data, validation_data, output_dir, training_arguments)
    recipe = _recipe(recipe, members, train_data)
    learning_rates = _learning_rates(recipe, learning_rates)
    data = {"train_dataset": train_data, "eval_dataset": validation_data}
    if data_collator is None and processing_class is None:
        data_collator = partial(collate, padding=padding_of(members[0]) or 0, classes=classes_of(members[0]))
    data |= {"data_collator": data_collator, "processing_class": processing_class}
    if compute_metrics is None and recipe.metric == "accuracy":
        compute_metrics = compute_accuracy
    data |= {"compute_metrics": compute_metrics, "callbacks": list(callbacks)}

    # By itself it would go by Transformers' verbosity.
    training_arguments = {"disable_tqdm": not progress} | training_arguments
    process = recipe.training_arguments(output_dir, **training_arguments)
    finished = []
    silence = nullcontext() if progress else redirect_stdout(io.StringIO())
    with _only_writer(Path(output_dir), process), silence:
        _where_written(process, lambda: _claim_members(Path(output_dir), len(members)))
        known_data = _where_written(process, lambda: _fingerprints(data, process))
        _say(process, f"recipe {recipe.name}: {recipe.summary(process)}")
        for index, member in enumerate(members):
            folder = Path(output_dir) / f"member-{index}"
            order = seed if data_seed is None else data_seed
            arguments = training_arguments | {"seed": seed + index, "data_seed": order + index}
            # Trainer then complains about a missing metric at the first validation already.
            arguments |= {"metric_for_best_model": recipe.metric, "greater_is_better": recipe.greater_is_better}
            _finetune_member(member, recipe, folder, learning_rates, arguments, data, known_data)
            finished.append(_load(member, folder))
    return finished


def compute_accuracy(prediction: Any) -> dict[str, float]:
    """`Trainer(compute_metrics=compute_accuracy)`: the share of right answers of the logits (samples, classes); NaN where
    one of them is NaN, which is no answer."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
    if np.isnan(logits).any():
        return {"accuracy": math.nan}
    return {"accuracy": float(np.mean(np.argmax(logits, axis=-1) == prediction.label_ids))}


def _recipe(recipe: Recipe | str | None, members: Sequence[PreTrainedModel], train_data: Any) -> Recipe:
    if recipe is not None:
        return recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    if any(map(is_peft_model, members)):
        raise ValueError(
            "there is no default recipe for members with adapters, which train at other rates: pass a recipe"
        )
    return default_recipe(described(members[0]), train_data)


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
            _check_adapters(index, member)
        elif not isinstance(member, PreTrainedModel) and not is_baseline(member):
            raise TypeError(f"members[{index}] is a {type(member).__name__}: pass Transformers or Hydra models")
    if train_data is None:
        raise ValueError("train_data is None: pass the rows to train on")
    if output_dir is None:
        raise ValueError("output_dir is None: pass a folder for the members, from which an interrupted call goes on")
    if validation_data is None:
        raise ValueError("validation_data is None: pass a validation set, by which members are chosen and reported")
    for name, dataset in {"train_data": train_data, "validation_data": validation_data}.items():
        if hasattr(dataset, "__len__") and len(dataset) == 0:
            raise ValueError(f"{name} has no rows: pass at least one")
    for name, instead in SETTLED_ELSEWHERE.items():
        if name in training_arguments:
            raise ValueError(f"{name} cannot be passed to finetune_members: pass {instead}")


def _check_adapters(index: int, member: Any) -> None:
    names = list(member.peft_config)
    if names != ["default"]:  # PEFT saves others in subfolders of their own
        raise ValueError(f'members[{index}] has the adapters {", ".join(names)}: pass one adapter, named "default"')


# One member


def _finetune_member(
    member: PreTrainedModel,
    recipe: Recipe,
    folder: Path,
    learning_rates: list[float],
    arguments: dict,
    data: dict,
    known_data: dict | None,
) -> None:
    """Trains with every learning rate and leaves the best in `folder`; `known_data` is there in processes that write."""
    process = recipe.training_arguments(folder, **arguments)
    _where_written(
        process, lambda: _claim(folder, _identity(member, recipe, learning_rates, arguments, process) | known_data)
    )
    if (folder / FINISHED).exists():
        _say(process, f"{folder.name}: already finished")
        return

    results, diverged = {}, {}
    for rate in learning_rates:
        try:
            results[rate] = _run(member, recipe, folder / f"lr-{rate}", arguments | {"learning_rate": rate}, data)
        except DivergedError as error:
            diverged[rate] = str(error)
            _say(process, f"{folder.name}, learning rate {rate:g}: diverged, {error}")
    if not results:
        reasons = "; ".join(f"{reason} at learning rate {rate:g}" for rate, reason in diverged.items())
        raise DivergedError(
            f"the training of {folder} diverged ({reasons}): pass lower learning_rates and another output_dir, or look for "
            "values in the data that are not finite"
        )
    best = max(results, key=lambda rate: _goodness(results[rate], recipe))
    if process.should_save:
        _load(member, folder / f"lr-{best}").save_pretrained(folder)
        record = {"learning_rate": best, "validation": results, "diverged": diverged}
        write_atomically(folder / FINISHED, json.dumps(record, indent=2))
        for checkpoint in folder.glob("lr-*/checkpoint-*"):
            shutil.rmtree(checkpoint)
    _wait(process)
    value = results[best][f"eval_{recipe.metric}"]
    _say(process, f"{folder.name}: finished, validation {recipe.metric} {value:.4f} at learning rate {best:g}")


def _run(member: PreTrainedModel, recipe: Recipe, folder: Path, arguments: dict, data: dict) -> dict[str, float]:
    """Trains a copy of the member in `folder`, from its last checkpoint if there is one; its validation metrics."""
    if (folder / FINISHED).exists():
        return _record(folder / FINISHED)
    process = recipe.training_arguments(folder, **arguments)
    trainer = _train(member, recipe, folder, process, data)
    metrics = {name: value for name, value in trainer.evaluate().items() if isinstance(value, (int, float))}
    if f"eval_{recipe.metric}" not in metrics:
        raise ValueError(
            f"validation gave {', '.join(metrics)} but no eval_{recipe.metric}, which {recipe.name} chooses by: return "
            f"{recipe.metric!r} from compute_metrics, and labels from the dataset"
        )
    if not math.isfinite(metrics[f"eval_{recipe.metric}"]):
        raise DivergedError(f"eval_{recipe.metric} is {metrics[f'eval_{recipe.metric}']} after the last step")
    trainer.save_model(os.fspath(folder))
    if process.should_save:
        write_atomically(folder / FINISHED, json.dumps(metrics, indent=2))
        for checkpoint in folder.glob("checkpoint-*"):
            shutil.rmtree(checkpoint)
    _wait(process)
    return metrics


def _train(member: PreTrainedModel, recipe: Recipe, folder: Path, process: TrainingArguments, data: dict) -> Trainer:
    """A Trainer whose model has been trained to the end."""
    loss = recipe.loss() if recipe.label_smoothing else None
    checkpoint = last_checkpoint(folder, process.world_size)
    about = f"{folder.parent.name}, learning rate {process.learning_rate:g}"
    if checkpoint is not None and _has_ended(trainer_state(checkpoint)):
        # Trainer would take one step more if it resumed here.
        best = trainer_state(checkpoint)["best_model_checkpoint"]
        chosen = folder / Path(best).name if recipe.keep_best and best else checkpoint
        _say(process, f"{about}: trained before, {chosen.name}")
        return FiniteTrainer(model=_load(member, chosen), args=process, compute_loss_func=loss, **data)

    if checkpoint is not None:
        _check_goes_on(checkpoint, process)
    model = copy.deepcopy(member)
    trainer = FiniteTrainer(
        model=model,
        args=process,
        compute_loss_func=loss,
        classifier_factor=recipe.classifier_factor,
        name=about,
        **data | {"callbacks": [*recipe.callbacks(), *data["callbacks"]]},
    )
    _say(process, f"{about}: {describe_trained(model) if checkpoint is None else f'going on from {checkpoint.name}'}")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_state()
    return trainer


def _check_goes_on(checkpoint: Path, process: TrainingArguments) -> None:
    """Refuses a checkpoint that lacks what Trainer would silently start anew: momenta, learning rate, random numbers."""
    if process.fsdp or process.deepspeed:
        return  # which have files of their own
    names = ["optimizer.pt", "scheduler.pt", *(["rng_state.pth"] if process.world_size == 1 else [])]
    missing = next((name for name in names if not (checkpoint / name).exists()), None)
    if missing is not None:
        raise ValueError(
            f"{checkpoint} has no {missing}, without which training would not go on as it was: remove that folder, and it goes "
            "on from an earlier one or from the start"
        )


def _has_ended(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's trainer_state is that of the last step, or of an early stop."""
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    return state["global_step"] >= state["max_steps"] or control.get("should_training_stop", False)


def last_checkpoint(folder: Path, processes: int = 1) -> Path | None:
    """The newest whole checkpoint of a run; Trainer writes its state last, so one without it was cut off. Of several
    processes each writes its random numbers too, without which Trainer would go on with others."""
    of_processes = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else []
    whole = [
        path
        for path in folder.glob("checkpoint-*")
        if trainer_state(path) is not None and all((path / name).is_file() for name in of_processes)
    ]
    return max(whole, key=lambda path: int(re.sub(r"\D", "", path.name)), default=None)


def trainer_state(checkpoint: Path) -> dict[str, Any] | None:
    """Trainer's state in a checkpoint; None where it is missing or was cut off in writing."""
    try:
        state = parse_json((checkpoint / "trainer_state.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def _goodness(metrics: dict[str, float], recipe: Recipe) -> tuple[float, float]:
    """Orders runs by the recipe's metric, and by the loss where that is equal."""
    value, loss = metrics[f"eval_{recipe.metric}"], metrics.get("eval_loss", 0.0)
    return (value if recipe.greater_is_better else -value, -loss)


def _load(member: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model saved in `folder` as `member` was: its dtype, device, attention backend, and ready to predict."""
    with broken_weights_named(folder):
        return _read(member, folder)


def _read(member: PreTrainedModel, folder: Path) -> PreTrainedModel:
    if is_peft_model(member):
        from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

        loaded = copy.deepcopy(member)
        weights = load_peft_weights(os.fspath(folder), device=str(member.device))
        check_nothing_is_missing(
            folder, set(get_peft_model_state_dict(member, save_embedding_layers=False)) - set(weights)
        )
        set_peft_model_state_dict(loaded, weights)
        return loaded.eval()
    if is_baseline(member):
        return _load_baseline(member, folder)
    loaded, found = type(member).from_pretrained(
        folder, dtype=member.dtype, attn_implementation=member.config._attn_implementation, output_loading_info=True
    )
    check_nothing_is_missing(folder, set(found["missing_keys"]))
    return loaded.to(member.device).eval()


def _load_baseline(member: nn.Module, folder: Path) -> nn.Module:
    if member.is_saved_in(folder):
        return type(member).from_pretrained(folder).to(member.device)
    loaded = copy.deepcopy(member)  # Trainer writes nothing but the weights of what is no model of Transformers
    loaded.load_state_dict(load_file(folder / SAFE_WEIGHTS_NAME))
    return loaded.eval()


# Run folders


@contextmanager
def _only_writer(folder: Path, process: TrainingArguments) -> Iterator[None]:
    """The processes that train together are one writer."""
    with ExitStack() as lock:
        _where_written(process, lambda: lock.enter_context(only_writer(folder)))
        yield


def _where_written(process: TrainingArguments, act: Callable[[], Any]) -> Any:
    """What `act` gives in a process that writes; what it raises there is raised in all of them."""
    result = error = None
    if process.should_save:
        try:
            result = act()
        except Exception as found:
            error = found
    for found in gather(error):
        if found is not None:
            raise found
    return result


def _record(path: Path) -> dict[str, Any]:
    """What a JSON file of a run holds."""
    try:
        found = parse_json(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is broken: remove {path.parent} to start again, or pass another output_dir")
    return found


def _claim_members(folder: Path, count: int) -> None:
    """Notes how many members there shall be, so that some of them are not taken for all; more may join later."""
    path = folder / MEMBERS
    found = _record(path).get("members", 0) if path.exists() else 0
    if found > count:
        raise ValueError(f"{folder} holds {found} members, and these are {count}: pass another output_dir")
    if found < count:
        write_atomically(path, json.dumps({"members": count}))


def _fingerprints(data: dict, process: TrainingArguments) -> dict[str, Any]:
    in_worker = process.dataloader_num_workers > 0
    sets = {"train_data": data["train_dataset"], "validation_data": data["eval_dataset"]}
    return {name: fingerprint_of_data(each, in_worker) for name, each in sets.items()}


def _identity(
    member: PreTrainedModel, recipe: Recipe, learning_rates: list[float], arguments: dict, process: TrainingArguments
) -> dict[str, Any]:
    """What a run depends on besides the data, as far as it can be told; two runs with the same may share a folder."""
    lasting = {name: value for name, value in arguments.items() if name not in COSMETIC_ARGUMENTS}
    about_member = {
        "class": type(member).__name__,
        "kept_heads": getattr(member.config, "kept_heads", None),
        "config": _taught_by(member.config),
        "weights": fingerprint_of_weights(member),
    }
    if is_peft_model(member):
        about_member["adapter"] = adapter_settings(member)  # its scale is in no weight
    elif is_baseline(member):
        about_member["arguments"] = member.arguments
    identity = {
        "member": about_member,
        "recipe": asdict(recipe),
        "learning_rates": learning_rates,
        "arguments": lasting,
        "rows_per_step": process.train_batch_size * process.world_size * process.gradient_accumulation_steps,
    }
    return json.loads(json.dumps(identity, default=str))  # as it will be read again


def _taught_by(config: Any) -> dict[str, Any]:
    """What decides how a model learns and is in none of its weights: dropouts, its loss, and what its classes are called."""
    parts = {"": config} | tower_configs(config)
    found = {
        f"{tower}.{name}" if tower else name: value
        for tower, part in parts.items()
        for name, value in part.to_dict().items()
        if "drop" in name or name == "ensemble_loss"
    }
    return found | {"id2label": config.id2label}


def _claim(folder: Path, identity: dict[str, Any]) -> None:
    """Takes a folder for this fine-tuning, or refuses one that holds another."""
    if (folder / RUN).exists():
        found = _record(folder / RUN)
        different = [name for name in identity if found.get(name) != identity[name]]
        # A finished run takes no further step: any number of processes may load it.
        if (folder / FINISHED).exists() and "rows_per_step" in different:
            different.remove("rows_per_step")
        if different:
            raise ValueError(
                f"{folder} holds another fine-tuning (other {', '.join(different)}): pass another output_dir, or "
                "remove that folder to start again"
            )
    elif folder.exists() and not all(UNFINISHED.fullmatch(path.name) for path in folder.iterdir()):
        raise ValueError(f"{folder} holds something else than a fine-tuning: pass another output_dir")
    else:
        write_atomically(folder / RUN, json.dumps(identity, indent=2))


def _wait(process: TrainingArguments) -> None:
    """Lets no process run ahead of the one that writes."""
    if process.world_size > 1:
        torch.distributed.barrier()


def _say(process: TrainingArguments, line: str) -> None:
    """One line of progress, from one process."""
    if process.should_save:
        print(line, flush=True)
