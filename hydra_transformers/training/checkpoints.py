"""Checkpoints of a training: which is the last whole one, whether it has ended, and the model in a folder."""

import copy
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from .._io.files import check_takes_files, parse_json
from .._io.processes import on_one_process
from .._io.records import RECORD, check_settings, record_settings
from ..model_info import is_baseline, is_peft_model


CHECKPOINTS = "checkpoints"  # the folder of an unfinished training, inside that of its result
SAVED = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a model whose training has ended: its checkpoints are removed last."""
    return any((folder / name).exists() for name in SAVED) and not (folder / CHECKPOINTS).exists()


def has_begun(folder: Path) -> bool:
    """Whether a folder, or one of several runs in it, holds a checkpoint or a finished run."""
    checkpoints = folder / CHECKPOINTS
    runs = checkpoints.glob(f"*/{RECORD}")
    return any(checkpoints.glob("checkpoint-*")) or any(
        is_finished(run.parent) or has_begun(run.parent) for run in runs
    )


def check_can_train_in(folder: Path) -> None:
    """Raises, before any work, where a folder holds something else than a training."""
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")} if folder.is_dir() else set()
    if names and (RECORD not in names or not ({CHECKPOINTS, *SAVED} & names or names == {RECORD})):
        raise ValueError(f"{folder} holds something else than a training: pass a new or empty output_dir")


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints in the folder of a finished training, whose sign they are until then."""
    # Renamed first: half of them, left behind by a kill, would look like a training that has just begun.
    hidden = folder / f".{CHECKPOINTS}"
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder / CHECKPOINTS, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def record_training(folder: Path, settings: dict[str, Any], **about: Any) -> None:
    """Records what a training is made with; raises where one that has begun was made with other settings. `about` may differ."""

    def act() -> None:
        if is_finished(folder):  # evaluated with batches of any size
            check_settings(folder, RECORD, {name: settings[name] for name in settings if "batch_size" not in name})
            return
        check_takes_files(folder)
        if has_begun(folder):
            check_settings(folder, RECORD, settings)
        else:
            record_settings(folder, RECORD, about | settings)

    on_one_process(act)


def last_checkpoint(folder: Path, processes: int = 1, is_sharded: bool = False) -> Path | None:
    """The newest whole checkpoint: with Trainer's state, which is written last, and, not sharded, with what Trainer would silently
    start anew. Raises where there are others only: with another number of processes Trainer would lose count of the epochs."""
    states = [f"rng_state_{rank}.pth" for rank in range(processes)] if processes > 1 else ["rng_state.pth"]
    names = [] if is_sharded else ["optimizer.pt", "scheduler.pt", *states]
    written = [path for path in folder.glob("checkpoint-*") if trainer_state(path) is not None]
    paths = [path for path in written if all((path / name).is_file() for name in names)]
    paths = [path for path in paths if is_sharded or len(list(path.glob("rng_state*"))) == processes]
    if written and not paths:
        raise ValueError(f"{folder} has no checkpoint of {processes} processes: start as many as before, or delete it")
    return max(paths, key=lambda path: int(re.sub(r"\D", "", path.name)), default=None)


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


def load_member(member: nn.Module, folder: str | os.PathLike) -> nn.Module:
    """The model saved in `folder`, in eval mode on the CPU, with the dtype and attention backend of `member`."""
    if is_peft_model(member):
        return _load_adapters(member, Path(folder))
    if is_baseline(member):  # of which Trainer writes the weights alone
        loaded = copy.deepcopy(member).cpu()
        loaded.load_state_dict(load_file(Path(folder) / SAFE_WEIGHTS_NAME))
        return loaded.eval()
    backend = member.config._attn_implementation
    loaded, loading = type(member).from_pretrained(
        folder, dtype=member.dtype, attn_implementation=backend, output_loading_info=True
    )
    _check_nothing_is_missing(folder, set(loading["missing_keys"]))
    return loaded.eval()


def _load_adapters(member: Any, folder: Path) -> PreTrainedModel:
    from peft import get_peft_model_state_dict, load_peft_weights, set_peft_model_state_dict

    loaded = copy.deepcopy(member)
    weights = load_peft_weights(os.fspath(folder), device="cpu")
    expected = set(get_peft_model_state_dict(member, save_embedding_layers=False))
    _check_nothing_is_missing(folder, expected - set(weights))
    set_peft_model_state_dict(loaded, weights)
    return loaded.to(torch.device("cpu")).eval()


def _check_nothing_is_missing(folder: str | os.PathLike, names: set[str]) -> None:
    if names:  # these weights would be random, or those from before
        raise ValueError(f"{folder} has no weights for {min(names)}: remove that folder and train again")
