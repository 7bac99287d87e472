"""Checkpoints of a training: which is the last whole one, whether it has ended, and the model in a
folder."""

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
from .._io.records import RECORD, check_settings, read_settings, record_settings
from ..model_info import is_baseline, is_peft_model


CHECKPOINTS = "checkpoints"  # the folder of an unfinished training, inside that of its result
VERSION = 2  # of the record of a training; the first had none, and digests of tokens
SINCE_VERSION_2 = ("texts", "tokenizer")
SAVED = ("model.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")


def is_finished(folder: Path) -> bool:
    """Whether a folder holds a model whose training has ended: its checkpoints are removed last."""
    return any((folder / name).exists() for name in SAVED) and not (folder / CHECKPOINTS).exists()


def has_begun(folder: Path) -> bool:
    """Whether a folder, or one of several runs in it, holds a checkpoint or a finished run."""
    checkpoints = folder / CHECKPOINTS
    if any(checkpoints.glob("checkpoint-*")):
        return True
    runs = [record.parent for record in checkpoints.glob(f"*/{RECORD}")]
    return any(is_finished(run) or has_begun(run) for run in runs)


def check_can_train_in(folder: Path) -> None:
    """Raise, before any work, where a folder holds something else than a training."""
    names = set()
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    has_record = RECORD in names
    is_alone = names == {RECORD}  # of a training that was stopped at once
    if names and not (has_record and (is_alone or {CHECKPOINTS, *SAVED} & names)):
        raise ValueError(f"{folder} holds something else than a training: pass a new or empty output_dir")


def remove_checkpoints(folder: Path) -> None:
    """Remove the checkpoints of a finished training, the sign of an unfinished one."""
    # Renamed first: half of them, left behind by a kill, would look like a training that has just
    # begun.
    hidden = folder / f".{CHECKPOINTS}"
    shutil.rmtree(hidden, ignore_errors=True)
    os.replace(folder / CHECKPOINTS, hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def record_training(folder: Path, settings: dict[str, Any], **about: Any) -> None:
    """Record what a training is made with, or raise where it has begun with other settings.

    about: what is recorded, too, and may differ
    """

    def act() -> None:
        if is_finished(folder):
            _check_is_of(folder, settings)
            return
        check_takes_files(folder)
        if has_begun(folder):
            if read_settings(folder / RECORD).get("version") != VERSION:
                raise ValueError(
                    f"{folder} has a training that another version of hydra-transformers has begun, and this one "
                    "cannot go on with it: pass another folder, or remove it"
                )
            check_settings(folder, RECORD, settings)
        else:
            record_settings(folder, RECORD, {"version": VERSION} | about | settings)

    on_one_process(act)


def _check_is_of(folder: Path, settings: dict[str, Any]) -> None:
    """Raise for a finished training that was made with other settings."""
    recorded = read_settings(folder / RECORD)
    lasting = {}
    for name, value in settings.items():
        is_new = name in SINCE_VERSION_2 and recorded.get("version") is None
        # It may be evaluated with batches of any size.
        if "batch_size" not in name and not is_new:
            lasting[name] = value
    check_settings(folder, RECORD, lasting)


def last_checkpoint(folder: Path, processes: int = 1, is_sharded: bool = False) -> Path | None:
    """Return the newest whole checkpoint; None where there is none.

    A whole one has Trainer's state, which is written last, and, not sharded, what Trainer would
    silently start anew. Raise where there are only those of another number of processes, with which
    Trainer would lose count of the epochs.
    """
    names = []
    if not is_sharded:
        states = ["rng_state.pth"]
        if processes > 1:
            states = [f"rng_state_{rank}.pth" for rank in range(processes)]
        names = ["optimizer.pt", "scheduler.pt", *states]

    written = [path for path in folder.glob("checkpoint-*") if trainer_state(path) is not None]
    whole = [path for path in written if all((path / name).is_file() for name in names)]
    if not is_sharded:
        whole = [path for path in whole if len(list(path.glob("rng_state*"))) == processes]
    if written and not whole:
        raise ValueError(f"{folder} has no checkpoint of {processes} processes: start as many as before, or delete it")
    return max(whole, key=_step_of, default=None)


def _step_of(checkpoint: Path) -> int:
    """Return the step after which a checkpoint was written, which its name ends with."""
    return int(re.sub(r"\D", "", checkpoint.name))


def trainer_state(checkpoint: Path) -> dict[str, Any] | None:
    """Return Trainer's state in a checkpoint; None where it is missing or incomplete."""
    try:
        state = parse_json((checkpoint / "trainer_state.json").read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    if not isinstance(state, dict):
        return None
    return state


def has_ended(state: dict[str, Any]) -> bool:
    """Whether a checkpoint's trainer_state is that of the last step, or of an early stop."""
    if state["global_step"] >= state["max_steps"]:
        return True
    callbacks = state.get("stateful_callbacks", {})
    control = callbacks.get("TrainerControl", {}).get("args", {})
    return control.get("should_training_stop", False)


def load_member(member: nn.Module, folder: str | os.PathLike) -> nn.Module:
    """Return the model saved in `folder`, in eval mode on the CPU, with the dtype and attention
    backend of `member`."""
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
