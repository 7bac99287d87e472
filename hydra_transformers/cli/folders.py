"""Finds and loads models in folders, and records which step filled a folder."""

import hashlib
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel

from .._io.files import check_takes_files, remove_leftovers, write_atomically
from ..baselines import Baseline
from ..baselines.baseline import MODEL_FOLDER
from ..data.prediction import ZeroShotClassifier
from ..data.processors import class_prompts, load_processor
from ..models.auto import HEADS, check_model_exists, load_trained
from ..training.run_folders import FINISHED, RUN
from ..uncertainty import CalibratedClassifier
from .errors import access_to
from .options import device_named


# The settings of a step, in its output folder: among others the number of "members".
PRUNE_SETTINGS, FINETUNE_SETTINGS, FUSE_SETTINGS = "prune.json", "finetune.json", "fuse.json"


# Models


def load_config(name: str) -> PreTrainedConfig:
    """The config of a supported model by Hub name or folder; for a baseline, of the model inside."""
    path = Path(name)
    inside = {"subfolder": MODEL_FOLDER} if is_baseline(name) else {}
    if path.is_dir() and not inside and not (path / "config.json").exists():
        if member_folders(path):
            raise ValueError(
                f"{name} holds members, not a model: fuse them first with `hydra-transformers fuse {name}`"
            )
        raise ValueError(f"the folder {name} holds no model: it has no config.json")
    with access_to(name, "model"):
        try:
            config = AutoConfig.from_pretrained(name, **inside)
        except ValueError as error:
            raise ValueError(f"Transformers does not know the model {name}: {str(error).splitlines()[0]}") from error
    if config.model_type not in HEADS:
        raise ValueError(f"{name} is a {config.model_type}: pass a {', '.join(HEADS)} model")
    return config


def load_model(name: str, device: str = "cpu") -> PreTrainedModel | Baseline:
    """A trained classifier, CLIP or SigLIP model or baseline by Hub name or folder, ready to predict."""
    load_config(name)  # its errors are clearer
    with access_to(name, "model"):
        return (Baseline.from_pretrained(name) if is_baseline(name) else load_trained(name)).to(device)


def load_with_decision(name: str, processor: str | None, device: str | None) -> tuple[nn.Module, Any]:
    """The model with its decision, and its processor; two towers become a classifier if they were calibrated as one."""
    device = device_named(device)
    config = load_config(name)
    reader = load_processor(processor or name, config)
    model = load_model(name, device)
    if CalibratedClassifier.is_saved_in(name):
        classes = CalibratedClassifier.classes_saved_in(name)
        if classes is not None:
            model = ZeroShotClassifier(model, class_prompts(config, reader, classes), classes)
        model = CalibratedClassifier.load(model, name).eval()
    elif getattr(config, "decision", None) is None:
        print("note: this model was not calibrated, so it never abstains and has no sets", file=sys.stderr)
    return model, reader


def is_baseline(name: str) -> bool:
    check_model_exists(name)
    with access_to(name, "model"):
        return Baseline.is_saved_in(name)


def check_is_hydra(config: PreTrainedConfig, name: str, or_baseline: bool = False) -> None:
    if not (config.model_type.startswith("hydra_") or (or_baseline and is_baseline(name))):
        raise ValueError(
            f"{name} is a plain {config.model_type}: pass a Hydra, the output of `hydra-transformers fuse`"
        )


# Members


def member_folders(folder: Path) -> list[Path]:
    """`member-0`, `member-1`, ... of a folder, in order."""
    found = [path for path in folder.glob("member-*") if re.fullmatch(r"member-\d+", path.name)]
    return sorted((path for path in found if (path / "config.json").exists()), key=_member_number)


def _member_number(path: Path) -> int:
    return int(path.name.removeprefix("member-"))


def models_named(names: Sequence[str]) -> list[str]:
    """The models that a command was given: each by folder or Hub name, or all of them by the folder of an earlier step."""
    folder = Path(names[0])
    if len(names) == 1 and not (folder / "config.json").exists():
        has_record = any((folder / step).exists() for step in (PRUNE_SETTINGS, FINETUNE_SETTINGS))
        if has_record or member_folders(folder):
            return [str(member) for member in members_in(folder)]
    return list(names)


def members_in(folder: Path) -> list[Path]:
    """The member folders of a step's output; refuses a folder that lacks some or all of them, or their training."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: pass the output of `hydra-transformers prune`")
    members = member_folders(folder)
    step = next((file for file in (FINETUNE_SETTINGS, PRUNE_SETTINGS) if (folder / file).exists()), None)
    expected = None if step is None else read_settings(folder / step).get("members")
    if step is None and not members:
        raise ValueError(f"{folder} holds no members: pass the output of `hydra-transformers prune` or `finetune`")
    if [_member_number(path) for path in members] != list(range(len(members) if expected is None else expected)):
        there = ", ".join(path.name for path in members) or "none"
        of_all = "" if expected is None else f" of {expected}"
        again = "its step" if step is None else f"`hydra-transformers {step.removesuffix('.json')}`"
        raise ValueError(
            f"{folder} lacks a member, it has {there}{of_all}: run {again} again with the same arguments, and it continues"
        )
    for path in folder.glob("member-*"):
        if (path / RUN).exists() and not (path / FINISHED).exists():
            raise ValueError(
                f"the training of {path} is not finished: run it again with the same arguments, and it continues"
            )
    return members


def are_fine_tunings(folder: Path) -> bool:
    """Whether the members in a folder, or of the Hydra in it, are separate fine-tunings, according to the steps' records."""
    records = [folder / file for file in (PRUNE_SETTINGS, FINETUNE_SETTINGS, FUSE_SETTINGS)]
    found = {record.name: read_settings(record) for record in records if record.exists()}
    of_several = isinstance(found.get(PRUNE_SETTINGS, {}).get("model"), list)
    return of_several or any(settings.get("fine_tunings") for settings in found.values())


def digest_of_names(names: Sequence[str]) -> str:
    """Identifies members by their folders without naming these: a Hydra's folder may be published."""
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in names]
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


# Output folders


def check_is_new(folder: Path) -> None:
    """Refuses, before any work, a folder that holds something or cannot be written."""
    remove_leftovers(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: pass another --output, or remove it")
    check_takes_files(folder)


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Records a step's settings in its folder; refuses a folder that a step with other settings has filled."""
    settings = json.loads(json.dumps(settings, default=str))
    record = folder / file
    remove_leftovers(folder)
    if record.exists() and any(path != record for path in folder.iterdir()):
        found = read_settings(record)
        for name, value in settings.items():
            if found.get(name) != value:
                raise ValueError(
                    f"{folder} was made with {name} {found.get(name)!r}, which now is {value!r}: pass another --output, or "
                    "remove it"
                )
        return
    if not record.exists():
        check_is_new(folder)
    check_takes_files(folder)
    write_atomically(record, json.dumps(settings, indent=1) + "\n")


def claim_for_training(folder: Path, source: Path, members: int, fine_tunings: bool) -> None:
    """Claims a folder for fine-tuning. fine_tunings: whether the members do not come from one backbone"""
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is where the members are read from: pass another --output")
    remove_leftovers(folder)
    trained = [path for path in folder.glob("member-*") if path.is_dir() and any(path.iterdir())]
    for path in trained:
        if not (path / RUN).exists():
            raise ValueError(f"{path} is not a fine-tuning: pass another --output, or remove it")
    settings, record = {"members": members, "fine_tunings": fine_tunings}, folder / FINETUNE_SETTINGS
    if trained and not record.exists():  # `finetune_members` made them
        write_atomically(record, json.dumps(settings))
    claim(folder, FINETUNE_SETTINGS, settings)


def read_settings(record: Path) -> dict[str, Any]:
    try:
        settings = json.loads(record.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is broken, so the settings of {record.parent} are unknown: make it again")
    return settings
