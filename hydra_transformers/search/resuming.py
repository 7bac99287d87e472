"""Ending a search in time and resuming it: the deadline, and the folder of finished steps."""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from .._io.files import parse_json, remove_leftovers, write_atomically


IDENTITY = "hydration.json"


class OutOfTime(Exception):
    """The time limit has passed."""


class Deadline(TrainerCallback):
    """Starts when it is made; as a callback of Trainer it ends a training, whose last checkpoint stays.

    minutes: None for no limit
    """

    def __init__(self, minutes: float | None):
        self.seconds = math.inf if minutes is None else 60 * minutes
        self.start = time.monotonic()

    @property
    def is_set(self) -> bool:
        return math.isfinite(self.seconds)

    @property
    def spent(self) -> float:
        return time.monotonic() - self.start

    def check(self) -> None:
        if self.spent > self.seconds:
            raise OutOfTime

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.check()


def in_words(seconds: float) -> str:
    """1 s, 40 s, 3 min, 1.5 h"""
    if seconds < 90:
        return f"{max(1, math.ceil(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class StepsFolder:
    """The finished steps of one search: the same models, data and settings, whatever the target and the time limit.

    folder: made if it does not exist; refused if it belongs to another search
    identity: everything that the steps depend on
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        identity = json.loads(json.dumps(identity, default=str))  # as it will be read again
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        remove_leftovers(folder)
        record = folder / IDENTITY
        if record.exists():
            found = _object_in(record)
            if found is None:
                raise ValueError(
                    f"{record} is broken, so nobody knows what steps {folder} holds: remove that folder, or pass another "
                    "output_dir"
                )
            different = [name for name in identity if found.get(name) != identity[name]]
            if different:
                raise ValueError(
                    f"{folder} holds the steps of another hydration (other {', '.join(different)}): pass another output_dir, or "
                    "remove that folder; data must come in the same order each time, so pass it without shuffling"
                )
        elif folder.exists() and any(path.name != ".lock" for path in folder.iterdir()):
            raise ValueError(f"{folder} holds something else than a hydration: pass another output_dir")
        else:
            write_atomically(record, json.dumps(identity, indent=1) + "\n")

    def path(self, *place: str) -> Path:
        path = self.folder.joinpath(*place)
        return path.with_name(f"{path.name}.json")

    def read(self, *place: str) -> dict[str, Any] | None:
        """The record that `write` left there; None where there is none, or one of another search."""
        path = self.path(*place)
        return _object_in(path) if self.has_made(path) else None

    def has_made(self, path: Path) -> bool:
        """Whether a JSON file, in this folder or another, is of this search."""
        record = _object_in(path) if path.exists() else None
        return record is not None and record.get("made_from") == self.digest

    def write(self, record: Mapping[str, Any], *place: str) -> None:
        write_atomically(self.path(*place), json.dumps({"made_from": self.digest, **record}, indent=1) + "\n")


def _object_in(path: Path) -> dict[str, Any] | None:
    try:
        found = parse_json(path.read_bytes())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None
