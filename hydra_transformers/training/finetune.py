"""Fine-tuning members one by one, in run folders that can be picked up again."""

import copy
import json
import math
import os
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, Trainer, TrainingArguments

from ..files import write_atomically
from ..fingerprints import fingerprint_of_weights
from .callback import describe_trained
from .lora import adapter_settings, is_peft_model
from .recipes import Recipe
from .recipes import recipe as recipe_by_name


# A run folder holds RUN from its start and FINISHED as the last thing that is written.
RUN, FINISHED = "run.json", "finished.json"

# Arguments that differ between runs, or on which more depends than Trainer knows.
SETTLED_ELSEWHERE = {
    "learning_rate": "learning_rates=[...]",
    "label_smoothing_factor": "dataclasses.replace(recipe, label_smoothing=...)",
    "load_best_model_at_end": "dataclasses.replace(recipe, keep_best=...)",
    "metric_for_best_model": "dataclasses.replace(recipe, metric=...)",
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
    recipe: Recipe | str,
    train_dataset: Any,
    eval_dataset: Any,
    output_dir: str | os.PathLike,
    seed: int = 0,
    data_seed: int | None = None,
    learning_rates: str | Sequence[float] | None = None,
    compute_metrics: Callable[[Any], dict[str, float]] | None = None,
    data_collator: Callable | None = None,
    processing_class: Any = None,
    **training_arguments,
) -> list[PreTrainedModel]:
    """Fine-tunes each member by itself (paper, 4.3) and returns the fine-tuned members; those passed in stay as they are.

    Args:
        members: the pruned members, or a `PeftModel` each, of which the adapter trains and is saved.
        recipe: a `Recipe`, or the name of one of the paper's.
        train_dataset, eval_dataset: what `Trainer` takes; `eval_dataset` is the validation set.
        output_dir: gets one folder per member, `member-0`, `member-1`, ..., from which the member can be loaded with
            `from_pretrained`. Below it lies one run folder per learning rate.
        seed: member i trains with `seed + i`: its own order of the data and its own dropout.
        data_seed: where the order of the data shall have a seed apart, `data_seed + i`.
        learning_rates: peak learning rates to choose from by validation, "grid" for the recipe's; by default the
            recipe's single `learning_rate`.
        compute_metrics: as in `Trainer`; must return the recipe's metric. By default `compute_accuracy`.
        data_collator, processing_class: as in `Trainer`.
        training_arguments: arguments of `TrainingArguments` that win over the recipe's.

    Call it again with the same arguments and it goes on where it was: finished members are loaded, an interrupted one
    resumes from its last checkpoint. A folder that holds another fine-tuning is refused. The checkpoints of a finished
    run are deleted. Works under `accelerate launch` and `torchrun`.
    """
    recipe = recipe_by_name(recipe) if isinstance(recipe, str) else recipe
    learning_rates = _learning_rates(recipe, learning_rates)
    _check_inputs(members, eval_dataset, training_arguments)
    data = {"train_dataset": train_dataset, "eval_dataset": eval_dataset}
    data |= {"data_collator": data_collator, "processing_class": processing_class}
    if compute_metrics is None and recipe.metric == "accuracy":
        compute_metrics = compute_accuracy
    data["compute_metrics"] = compute_metrics

    finished = []
    for index, member in enumerate(members):
        folder = Path(output_dir) / f"member-{index}"
        order = seed if data_seed is None else data_seed
        arguments = training_arguments | {"seed": seed + index, "data_seed": order + index}
        # Trainer then complains about a missing metric at the first validation already.
        arguments |= {"metric_for_best_model": recipe.metric, "greater_is_better": recipe.greater_is_better}
        _finetune_member(member, recipe, folder, learning_rates, arguments, data)
        finished.append(_load(member, folder))
    return finished


def compute_accuracy(prediction: Any) -> dict[str, float]:
    """`Trainer(compute_metrics=compute_accuracy)`: the share of right answers of the logits (samples, classes)."""
    logits = prediction.predictions
    logits = logits[0] if isinstance(logits, tuple) else logits
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
    return [float(rate) for rate in learning_rates]


def _check_inputs(members: Sequence[PreTrainedModel], eval_dataset: Any, training_arguments: dict) -> None:
    if isinstance(members, nn.Module):
        raise TypeError(f"members is a {type(members).__name__}: pass a list of pruned members")
    if not members:
        raise ValueError("members has no models: pass a list of pruned members")
    for index, member in enumerate(members):
        if is_peft_model(member):
            _check_adapters(index, member)
        elif not isinstance(member, PreTrainedModel):
            raise TypeError(f"members[{index}] is a {type(member).__name__}: pass Transformers or Hydra models")
    if eval_dataset is None:
        raise ValueError("eval_dataset is None: pass a validation set, by which members are chosen and reported")
    for name, instead in SETTLED_ELSEWHERE.items():
        if name in training_arguments:
            raise ValueError(f"{name} cannot be passed to finetune_members: pass {instead}")


def _check_adapters(index: int, member: Any) -> None:
    names = list(member.peft_config)
    if names != ["default"]:  # PEFT saves others in subfolders of their own
        raise ValueError(f'members[{index}] has the adapters {", ".join(names)}: pass one adapter, named "default"')


# One member


def _finetune_member(
    member: PreTrainedModel, recipe: Recipe, folder: Path, learning_rates: list[float], arguments: dict, data: dict
) -> None:
    """Trains with every learning rate and leaves the best in `folder`."""
    process = recipe.training_arguments(folder, **arguments)
    identity = _identity(member, recipe, learning_rates, arguments, data)
    with process.main_process_first(local=False):
        _claim(folder, identity, process.should_save)
    if (folder / FINISHED).exists():
        _say(process, f"{folder.name}: already finished")
        return

    results = {}
    for rate in learning_rates:
        run_folder = folder / f"lr-{rate}"
        results[rate] = _run(member, recipe, run_folder, arguments | {"learning_rate": rate}, data)
    best = max(results, key=lambda rate: _goodness(results[rate], recipe))
    if process.should_save:
        _load(member, folder / f"lr-{best}").save_pretrained(folder)
        write_atomically(folder / FINISHED, json.dumps({"learning_rate": best, "validation": results}, indent=2))
    _wait(process)
    value = results[best][f"eval_{recipe.metric}"]
    _say(process, f"{folder.name}: finished, validation {recipe.metric} {value:.4f} at learning rate {best:g}")


def _run(member: PreTrainedModel, recipe: Recipe, folder: Path, arguments: dict, data: dict) -> dict[str, float]:
    """Trains a copy of the member in `folder`, from its last checkpoint if there is one; its validation metrics."""
    if (folder / FINISHED).exists():
        return json.loads((folder / FINISHED).read_text())
    process = recipe.training_arguments(folder, **arguments)
    trainer = _train(member, recipe, folder, process, data)
    metrics = {name: value for name, value in trainer.evaluate().items() if isinstance(value, (int, float))}
    if f"eval_{recipe.metric}" not in metrics:
        raise ValueError(
            f"validation gave {', '.join(metrics)} but no eval_{recipe.metric}, which {recipe.name} chooses by: return "
            f"{recipe.metric!r} from compute_metrics, and labels from the dataset"
        )
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
    checkpoint = last_checkpoint(folder)
    about = f"{folder.parent.name}, learning rate {process.learning_rate:g}"
    if checkpoint is not None and _has_ended(trainer_state(checkpoint)):
        # Trainer would take one step more if it resumed here.
        best = trainer_state(checkpoint)["best_model_checkpoint"]
        chosen = folder / Path(best).name if recipe.keep_best and best else checkpoint
        _say(process, f"{about}: trained before, {chosen.name}")
        return Trainer(model=_load(member, chosen), args=process, compute_loss_func=loss, **data)

    model = copy.deepcopy(member)
    trainer = Trainer(model=model, args=process, compute_loss_func=loss, callbacks=recipe.callbacks(), **data)
    _say(process, f"{about}: {describe_trained(model) if checkpoint is None else f'going on from {checkpoint.name}'}")
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    trainer.save_state()
    return trainer


def _has_ended(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's trainer_state is that of the last step, or of an early stop."""
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    return state["global_step"] >= state["max_steps"] or control.get("should_training_stop", False)


def last_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint of a run; Trainer writes its state last, so one without it was cut off."""
    whole = [path for path in folder.glob("checkpoint-*") if trainer_state(path) is not None]
    return max(whole, key=lambda path: int(re.sub(r"\D", "", path.name)), default=None)


def trainer_state(checkpoint: Path) -> dict[str, Any] | None:
    """Trainer's state in a checkpoint; None where it is missing or was cut off in writing."""
    try:
        return json.loads((checkpoint / "trainer_state.json").read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def _goodness(metrics: dict[str, float], recipe: Recipe) -> tuple[float, float]:
    """Orders runs by the recipe's metric, and by the loss where that is equal; a diverged run is the worst."""
    value, loss = metrics[f"eval_{recipe.metric}"], metrics.get("eval_loss", 0.0)
    if not (math.isfinite(value) and math.isfinite(loss)):
        return (-math.inf, -math.inf)
    return (value if recipe.greater_is_better else -value, -loss)


def _load(member: PreTrainedModel, folder: Path) -> PreTrainedModel:
    """The model saved in `folder` as `member` was: its dtype, device, attention backend, and ready to predict."""
    if is_peft_model(member):
        from peft import load_peft_weights, set_peft_model_state_dict

        loaded = copy.deepcopy(member)
        set_peft_model_state_dict(loaded, load_peft_weights(os.fspath(folder), device=str(member.device)))
        return loaded.eval()
    loaded = type(member).from_pretrained(
        folder, dtype=member.dtype, attn_implementation=member.config._attn_implementation
    )
    return loaded.to(member.device).eval()


# Run folders


def _identity(member, recipe: Recipe, learning_rates: list[float], arguments: dict, data: dict) -> dict[str, Any]:
    """What a run depends on, as far as it can be told; two runs with the same may share a folder."""
    lasting = {name: value for name, value in arguments.items() if name not in COSMETIC_ARGUMENTS}
    rows = {
        name: len(data[name]) if hasattr(data[name], "__len__") else None for name in ("train_dataset", "eval_dataset")
    }
    about_member = {
        "class": type(member).__name__,
        "kept_heads": getattr(member.config, "kept_heads", None),
        "weights": fingerprint_of_weights(member),
    }
    if is_peft_model(member):
        about_member["adapter"] = adapter_settings(member)  # its scale is in no weight
    identity = {
        "member": about_member,
        "recipe": asdict(recipe),
        "learning_rates": learning_rates,
        "arguments": lasting,
        "rows": rows,
    }
    return json.loads(json.dumps(identity, default=str))  # as it will be read again


def _claim(folder: Path, identity: dict[str, Any], should_write: bool) -> None:
    """Takes a folder for this fine-tuning, or refuses one that holds another."""
    if (folder / RUN).exists():
        found = json.loads((folder / RUN).read_text())
        different = [name for name in identity if found.get(name) != identity[name]]
        if different:
            raise ValueError(
                f"{folder} holds another fine-tuning (other {', '.join(different)}): pass another output_dir, or "
                "remove that folder to start again"
            )
    elif folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} holds something else than a fine-tuning: pass another output_dir")
    elif should_write:
        write_atomically(folder / RUN, json.dumps(identity, indent=2))


def _wait(process: TrainingArguments) -> None:
    """Lets no process run ahead of the one that writes."""
    if process.world_size > 1:
        torch.distributed.barrier()


def _say(process: TrainingArguments, line: str) -> None:
    """One line of progress, from one process."""
    if process.should_save:
        print(line, flush=True)
