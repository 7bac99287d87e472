"""What a folder was made with: recorded in it, and compared when its command or function is called again."""

import json
from pathlib import Path
from typing import Any

from .files import check_takes_files, write_atomically


RECORD = "finetune.json"


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
    check_takes_files(folder)


def record_settings(folder: Path, file: str, settings: dict[str, Any]) -> None:
    write_atomically(folder / file, json.dumps(settings, indent=1, default=str) + "\n")


def check_settings(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Refuses a folder that a command filled with other settings."""
    settings = json.loads(json.dumps(settings, default=str))
    before = read_settings(folder / file)
    for name, value in settings.items():
        if before.get(name) != value:
            change = f"{name} {before.get(name)!r}, which now is {value!r}"
            change = change if len(change) < 120 else f"other {name}"
            raise ValueError(f"{folder} was made with {change}: pass another folder, or remove it")


def read_settings(record: Path) -> dict[str, Any]:
    try:
        settings = json.loads(record.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is broken, so the settings of {record.parent} are unknown: make it again")
    return settings
