"""Finds and loads models in folders, and records which step filled a folder."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from .._io.files import check_takes_files, write_atomically
from ..serving.saved_models import load_config, load_model, member_folders, member_number
from ..training.checkpoints import CHECKPOINTS, is_finished


__all__ = ["load_config", "load_model"]  # commands import them from here

# The settings of a step, in its output folder: among others the number of "members".
PRUNE_SETTINGS, FINETUNE_SETTINGS, FUSE_SETTINGS = "prune.json", "finetune.json", "fuse.json"


# Models


def check_is_hydra(config: PreTrainedConfig, name: str) -> None:
    if not config.model_type.startswith("hydra_"):
        raise ValueError(
            f"{name} is a plain {config.model_type}: pass a Hydra, the output of `hydra-transformers fuse`"
        )


# Members


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
    if [member_number(path) for path in members] != list(range(len(members) if expected is None else expected)):
        there = ", ".join(path.name for path in members) or "none"
        of_all = "" if expected is None else f" of {expected}"
        again = "its step" if step is None else f"`hydra-transformers {step.removesuffix('.json')}`"
        raise ValueError(
            f"{folder} lacks a member, it has {there}{of_all}: run {again} again with the same arguments, and it continues"
        )
    for path in folder.glob("member-*"):
        if (path / CHECKPOINTS).exists():
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


def made_by(folder: Path) -> dict[str, Any]:
    """What the steps' records say of how members were made: how many fine-tunings each is the mean of ("averaged"), and whether
    they were tuned jointly with a teacher ("taught")."""
    records = [read_settings(path) for file in (FINETUNE_SETTINGS, FUSE_SETTINGS) if (path := folder / file).exists()]
    return {name: each[name] for each in records for name in ("averaged", "taught") if each.get(name)}


def digest_of_names(names: Sequence[str]) -> str:
    """Identifies members by their folders without naming these: a Hydra's folder may be published."""
    places = [str(Path(name).resolve()) if Path(name).exists() else name for name in names]
    return hashlib.sha256("\n".join(places).encode()).hexdigest()


# Output folders


def check_is_new(folder: Path) -> None:
    """Refuses, before any work, a folder that holds something or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: pass another --output, or remove it")
    check_takes_files(folder)


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Records a step's settings in its folder; refuses a folder that a step with other settings has filled.

    Records alone, of steps that refused their arguments, fill no folder.
    """
    settings = json.loads(json.dumps(settings, default=str))
    record, records = folder / file, (file, PRUNE_SETTINGS, FINETUNE_SETTINGS)
    others = [path for path in folder.rglob("*") if path.name not in records]
    if record.exists() and any(path.is_symlink() or not path.is_dir() for path in others):
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


def claim_for_training(folder: Path, source: Path, members: int, fine_tunings: bool, taught: bool = False) -> None:
    """Claims a folder for fine-tuning.

    fine_tunings: whether the members do not come from one backbone
    taught: whether a Hydra is tuned as a whole, with a teacher
    """
    if folder.resolve() == source.resolve():
        raise ValueError(f"{folder} is where the members are read from: pass another --output")
    trained = [path for path in folder.glob("member-*") if path.is_dir() and any(path.iterdir())]
    for path in trained:
        if not (is_finished(path) or (path / CHECKPOINTS).exists()):
            raise ValueError(f"{path} is not a fine-tuning: pass another --output, or remove it")
    settings = (
        {"members": members, "fine_tunings": fine_tunings} | made_by(source) | ({"taught": True} if taught else {})
    )
    record = folder / FINETUNE_SETTINGS
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
