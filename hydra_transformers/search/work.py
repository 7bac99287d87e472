"""The work folder: every finished step, known again by what it was made from."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._io.files import parse_json, remove_leftovers, write_atomically


IDENTITY = "hydration.json"


class Work:
    """A folder that belongs to one hydration: the same models, data and settings, whatever the target.

    folder: is made, or gone on with; one of another hydration is refused
    identity: what the steps depend on
    """

    def __init__(self, folder: Path, identity: Mapping[str, Any]):
        self.folder = folder
        identity = json.loads(json.dumps(identity, default=str))  # as it will be read again
        self.digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
        remove_leftovers(folder)
        record = folder / IDENTITY
        if record.exists():
            found = self._identity_in(record)
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

    def _identity_in(self, record: Path) -> dict[str, Any]:
        try:
            found = parse_json(record.read_bytes())
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(
                f"{record} is broken, so nobody knows what steps {self.folder} holds: remove that folder, or pass another "
                "output_dir"
            )
        return found

    def read(self, *place: str) -> dict[str, Any] | None:
        """What `write` left there; None where there is nothing, or something that was made from something else."""
        return self._made_here(self.path(*place))

    def is_made_here(self, path: Path) -> bool:
        """Whether a JSON file, of this folder or another, is of this hydration."""
        return self._made_here(path) is not None

    def _made_here(self, path: Path) -> dict[str, Any] | None:
        if not path.exists():
            return None
        try:
            record = parse_json(path.read_bytes())
        except ValueError:
            return None
        return record if isinstance(record, dict) and record.get("made_from") == self.digest else None

    def write(self, record: Mapping[str, Any], *place: str) -> None:
        text = json.dumps({"made_from": self.digest, **record}, indent=1)
        write_atomically(self.path(*place), text + "\n")

    def path(self, *place: str) -> Path:
        path = self.folder.joinpath(*place)
        return path.with_name(f"{path.name}.json")
