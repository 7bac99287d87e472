"""Files and folders of commands: which exist, what they hold, and what may be written into them."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._io.files import check_takes_files, write_atomically


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

# What a command was asked to do, in its output folder.
PRUNE_SETTINGS, FINETUNE_SETTINGS = "prune.json", "finetune.json"


def data_name(text: str) -> str:
    """A folder, file or Hub name; a file that is not there is refused before anything is loaded."""
    if text.endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet")) and not Path(text).exists():
        raise FileNotFoundError(f"there is no folder or file {text}")
    return text


def check_is_hydra(config: "PreTrainedConfig", name: str) -> None:
    if not config.model_type.startswith("hydra_"):
        raise ValueError(
            f"{name} is a plain {config.model_type}: pass a Hydra, the output of `hydra-transformers finetune` or `fuse`"
        )


def models_named(names: Sequence[str]) -> list[str]:
    """The models that a command was given: each by folder or Hub name, or all of them by a folder of members."""
    from ..serving.saved_models import member_folders

    folder = Path(names[0])
    if len(names) > 1 or (folder / "config.json").exists() or not folder.is_dir():
        return list(names)
    members = member_folders(folder)
    record = folder / PRUNE_SETTINGS
    expected = read_settings(record).get("members") if record.exists() else len(members)
    if len(members) != expected:
        raise ValueError(
            f"{folder} has {len(members)} of {expected} members: run its command again with the same arguments, and it "
            "continues"
        )
    return [str(member) for member in members] or list(names)


def read_members(names: Sequence[str]) -> "tuple[list[str], list[PreTrainedConfig], Any | None]":
    """The models that a command was given, their configs, and the processor that all share; None where the first has none."""
    from ..data.processors import check_same_processors, find_processor
    from ..serving.saved_models import load_config

    names = models_named(names)
    configs = [load_config(name) for name in names]
    processor = find_processor(names[0], configs[0])
    if processor is not None:
        check_same_processors(names, configs, processor)
    return names, configs, processor


def check_is_new(folder: Path) -> None:
    """Refuses, before any work, a folder that holds something or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: pass another --output, or remove it")
    check_takes_files(folder)


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Records a command's settings in its new folder; refuses one that the command filled with other settings."""
    if not (folder / file).exists():
        check_is_new(folder)
        record_settings(folder, file, settings)
    check_settings(folder, file, settings)


def record_settings(folder: Path, file: str, settings: dict[str, Any]) -> None:
    write_atomically(folder / file, json.dumps(settings, indent=1, default=str) + "\n")


def check_settings(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Refuses a folder that a command filled with other settings."""
    settings = json.loads(json.dumps(settings, default=str))
    before = read_settings(folder / file) if (folder / file).exists() else settings
    for name, value in settings.items():
        if before.get(name) != value:
            raise ValueError(
                f"{folder} was made with {name} {before.get(name)!r}, which now is {value!r}: pass another --output, or "
                "remove it"
            )
    check_takes_files(folder)


def read_settings(record: Path) -> dict[str, Any]:
    try:
        settings = json.loads(record.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is broken, so the settings of {record.parent} are unknown: make it again")
    return settings


def note_training_rows(model: str, data: str, split: str | None) -> None:
    """Prints a note where rows may be those that a model was fine-tuned on."""
    record = Path(model) / FINETUNE_SETTINGS
    trained_on = read_settings(record).get("data") if record.exists() else None
    same = trained_on is not None and Path(trained_on).resolve() == Path(data).resolve()
    is_training = str(split).startswith("train") or (split is None and same and Path(data).is_file())
    if same and is_training:
        note = f"{model} was trained on rows of {data}, so they say too much: pass --split validation, or --split test"
        print(f"note: {note}", file=sys.stderr)
