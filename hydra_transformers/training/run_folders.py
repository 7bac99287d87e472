"""The folders of fine-tunings: which run they belong to, and where it resumes."""

import copy
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME

from .._io.files import parse_json, write_atomically
from .._io.folder_lock import only_writer
from .._io.processes import on_one_process
from ..data.fingerprints import fingerprint_of_weights
from ..fusion import tower_configs
from .lora import adapter_settings, is_peft_model
from .parameter_groups import is_baseline
from .recipes import Recipe


# A run folder holds RUN from its start, and FINISHED is written last; MEMBERS, in the folder above, is the number of members.
RUN, FINISHED, MEMBERS = "run.json", "finished.json", "members.json"

# Arguments that do not change the weights: a run may resume with others.
COSMETIC_ARGUMENTS = {
    *("dataloader_num_workers", "dataloader_pin_memory", "disable_tqdm", "log_level", "logging_first_step"),
    *("logging_steps", "logging_strategy", "report_to", "run_name", "save_total_limit"),
}
# Settings of SpecAugment, by which Wav2Vec2 and others mask parts of sounds in training.
SOUND_MASKS = ("apply_spec_augment", "mask_time_", "mask_feature_")


# Processes that train together


@contextmanager
def only_one_run(folder: Path, process: TrainingArguments, members: int) -> Iterator[None]:
    """Keeps other trainings out of a folder; the processes that train together are one. Where all members are finished, nothing
    will be written: any number of trainings may then load them at once."""

    def claim_folder() -> None:
        if not all_finished(folder, members):
            lock.enter_context(only_writer(folder))

    with ExitStack() as lock:
        on_writer(process, claim_folder)
        yield


def on_writer(process: TrainingArguments, act: Callable[[], Any]) -> Any:
    """Calls `act` in the processes that write, and lets the others wait; its errors are raised in all of them."""
    return on_one_process(act, process.should_save)


# Which run a folder belongs to


def read_record(path: Path) -> dict[str, Any]:
    try:
        found = parse_json(path.read_bytes())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is broken: remove {path.parent} to start again, or pass another output_dir")
    return found


def claim_members(folder: Path, count: int) -> None:
    """Records the number of members, so that some of them are not taken for all; more may join later."""
    path = folder / MEMBERS
    found = read_record(path).get("members", 0) if path.exists() else 0
    if found > count:
        raise ValueError(f"{folder} holds {found} members, and these are {count}: pass another output_dir")
    if found < count:
        write_atomically(path, json.dumps({"members": count}))


def all_finished(folder: Path, count: int) -> bool:
    """Whether `count` members are recorded and trained to the end."""
    is_recorded = (folder / MEMBERS).exists() and read_record(folder / MEMBERS).get("members", 0) >= count
    return is_recorded and all((folder / f"member-{index}" / FINISHED).exists() for index in range(count))


def claim(folder: Path, identity: dict[str, Any]) -> None:
    """Takes a folder for this fine-tuning, or refuses one that holds another."""
    if (folder / RUN).exists():
        found = read_record(folder / RUN)
        different = [name for name in identity if found.get(name) != identity[name]]
        # Any number of processes may load a finished run.
        if (folder / FINISHED).exists() and "rows_per_step" in different:
            different.remove("rows_per_step")
        if different:
            raise ValueError(
                f"{folder} holds another fine-tuning (other {', '.join(different)}): pass another output_dir, or "
                "remove that folder to start again"
            )
    elif folder.exists() and not all(path.name.endswith(".tmp") for path in folder.iterdir()):
        raise ValueError(f"{folder} holds something else than a fine-tuning: pass another output_dir")
    else:
        write_atomically(folder / RUN, json.dumps(identity, indent=2))


def identity_of(
    member: PreTrainedModel, recipe: Recipe, learning_rates: list[float], arguments: dict, process: TrainingArguments
) -> dict[str, Any]:
    """What a run depends on, besides the data: a folder resumes only with the same."""
    about_member = {
        "class": type(member).__name__,
        "kept_heads": getattr(member.config, "kept_heads", None),
        "config": _training_config(member.config),
        "weights": fingerprint_of_weights(member),
    }
    if is_peft_model(member):
        about_member["adapter"] = adapter_settings(member)  # its scale is in no weight
    elif is_baseline(member):
        about_member["arguments"] = member.arguments
    identity = {
        "member": about_member,
        "recipe": recipe.identity,
        "learning_rates": learning_rates,
        "arguments": {name: value for name, value in arguments.items() if name not in COSMETIC_ARGUMENTS},
        "rows_per_step": process.train_batch_size * process.world_size * process.gradient_accumulation_steps,
    }
    return json.loads(json.dumps(identity, default=str))  # as it will be read back


def _training_config(config: Any) -> dict[str, Any]:
    """The settings that change how a model learns: dropouts, masks over sounds, its loss, and the names of its classes."""
    found = {
        f"{tower}.{name}" if tower else name: value
        for tower, part in ({"": config} | tower_configs(config)).items()
        for name, value in part.to_dict().items()
        if "drop" in name or name.startswith(SOUND_MASKS) or name == "ensemble_loss"
    }
    return found | {"id2label": config.id2label}


# Going on from a checkpoint


def last_checkpoint(folder: Path, processes: int = 1) -> Path | None:
    """The newest whole checkpoint of a run. Trainer writes its state last, and several processes write their random states."""
    of_processes = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else []
    whole = [
        path
        for path in folder.glob("checkpoint-*")
        if trainer_state(path) is not None and all((path / name).is_file() for name in of_processes)
    ]
    return max(whole, key=lambda path: int(re.sub(r"\D", "", path.name)), default=None)


def trainer_state(checkpoint: Path) -> dict[str, Any] | None:
    """Trainer's state in a checkpoint; None where it is missing or incomplete."""
    try:
        state = parse_json((checkpoint / "trainer_state.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    return state if isinstance(state, dict) else None


def has_ended(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's trainer_state is that of the last step, or of an early stop."""
    control = state.get("stateful_callbacks", {}).get("TrainerControl", {}).get("args", {})
    return state["global_step"] >= state["max_steps"] or control.get("should_training_stop", False)


def check_can_resume(checkpoint: Path, process: TrainingArguments) -> None:
    """Refuses a checkpoint without momenta, learning rate or random state: Trainer would silently start them anew."""
    if process.fsdp or process.deepspeed:
        return  # they have files of their own
    names = ["optimizer.pt", "scheduler.pt", *(["rng_state.pth"] if process.world_size == 1 else [])]
    missing = next((name for name in names if not (checkpoint / name).exists()), None)
    if missing is not None:
        raise ValueError(
            f"{checkpoint} has no {missing}, without which training would not go on as it was: remove that folder, and it goes "
            "on from an earlier one or from the start"
        )


def load_member(
    member: PreTrainedModel, folder: str | os.PathLike, device: torch.device | str | None = None
) -> PreTrainedModel:
    """The model saved in `folder`, in eval mode, with the dtype, attention backend and (by default) device of `member`."""
    load = _load_adapters if is_peft_model(member) else _load_baseline if is_baseline(member) else _load_model
    try:
        return load(member, Path(folder)).to(member.device if device is None else device)
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} are broken ({error}): remove that folder and train again"
        ) from error


def _load_model(member: PreTrainedModel, folder: Path) -> PreTrainedModel:
    backend = member.config._attn_implementation
    loaded, found = type(member).from_pretrained(
        folder, dtype=member.dtype, attn_implementation=backend, output_loading_info=True
    )
    _check_nothing_is_missing(folder, set(found["missing_keys"]))
    return loaded.eval()


def _load_adapters(member: Any, folder: Path) -> Any:
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    loaded = copy.deepcopy(member)
    weights = load_peft_weights(os.fspath(folder), device=str(member.device))
    expected = set(get_peft_model_state_dict(member, save_embedding_layers=False))
    _check_nothing_is_missing(folder, expected - set(weights))
    set_peft_model_state_dict(loaded, weights)
    return loaded.eval()


def _load_baseline(member: nn.Module, folder: Path) -> nn.Module:
    loaded = copy.deepcopy(member)  # of a model that is not Transformers' own, Trainer writes the weights alone
    loaded.load_state_dict(load_file(folder / SAFE_WEIGHTS_NAME))
    return loaded.eval()


def _check_nothing_is_missing(folder: Path, names: set[str]) -> None:
    if names:  # these weights would be random, or those from before
        raise ValueError(f"{folder} has no weights for {min(names)}: remove that folder and train again")
