"""Records in a folder what it was made with, and compares that when its command is called again."""

import json
from pathlib import Path
from typing import Any

from .files import check_takes_files, write_atomically


RECORD = "finetune.json"
LONGEST_CHANGE = 120  # characters of an error that shows two values; longer ones name the setting alone


def check_is_new(folder: Path) -> None:
    """Raise, before any work, for a folder that holds something or cannot be written."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} exists already: pass another --output, or remove it")
    check_takes_files(folder)


def claim(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Record a command's settings in its new folder; raise if it was filled with other settings."""
    if not (folder / file).exists():
        check_is_new(folder)
        record_settings(folder, file, settings)
    check_settings(folder, file, settings)
    check_takes_files(folder)


def record_settings(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Write settings as JSON; what JSON cannot hold becomes text."""
    content = json.dumps(settings, indent=1, default=str)
    write_atomically(folder / file, content + "\n")


def check_settings(folder: Path, file: str, settings: dict[str, Any]) -> None:
    """Raise for a folder that a command filled with other settings."""
    settings = json.loads(json.dumps(settings, default=str))  # as they are when they are read back
    recorded = read_settings(folder / file)
    for name, value in settings.items():
        if recorded.get(name) == value:
            continue
        change = f"{name} {recorded.get(name)!r}, which now is {value!r}"
        if len(change) >= LONGEST_CHANGE:
            change = f"other {name}"
        raise ValueError(f"{folder} was made with {change}: pass another folder, or remove it")


def read_settings(record: Path) -> dict[str, Any]:
    """Return the settings that `record_settings` wrote; raise for a file that is broken."""
    try:
        settings = json.loads(record.read_text())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(f"{record} is broken, so the settings of {record.parent} are unknown: make it again")
    return settings
