"""Writes files and folders whole or not at all.

Unfinished ones are called `.NAME.ID.tmp` with a random id. Each is removed by the call that made it and by nothing else: a file of
a user, or of another process, is never taken for one.
"""

import json
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


LAST = "config.json"  # the sign of a complete model
WEIGHTS = "model*.safetensors*"  # Transformers would read those of an earlier model, which had another number of files


def write_atomically(path: str | os.PathLike, content: str | bytes) -> Path:
    """Writes `content` to a temporary file and renames it to `path`; follows symlinks, creates missing folders."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    unfinished = _unfinished(place.parent, place.name)
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)
    return Path(path)


def parse_json(content: bytes) -> Any:
    """The content of a JSON file; a ValueError for anything wrong with it (not text, not JSON, nested too deep)."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@contextmanager
def written_whole(folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `folder` at the end of the block.

    If `folder` exists, the files are moved into it: those of the same names are replaced, and a model replaces the weights of
    another one. `config.json` is removed first and written last. Other files stay.
    """
    folder = Path(os.path.realpath(folder))
    is_new = not folder.exists()
    # A folder may be a mount point: files are moved within it.
    unfinished = _unfinished(folder.parent if is_new else folder, folder.name)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if is_new:
            os.replace(unfinished, folder)
        else:
            _move(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    """Moves the files of a folder into another one."""
    if (source / LAST).exists():
        for replaced in (target / LAST, *target.glob(WEIGHTS)):
            replaced.unlink(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == LAST):
        place = target / path.name
        if path.is_dir() and place.is_dir():
            _move(path, place)
        else:
            os.replace(path, place)


def check_takes_files(folder: str | os.PathLike) -> None:
    """Raises an error, before any work, for a folder that could not be made or written into."""
    place = Path(os.path.realpath(folder))
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{folder} cannot be written into ({error.strerror}: {existing}): pass another") from error


def _unfinished(folder: Path, name: str) -> Path:
    return folder / f".{name}.{uuid.uuid4().hex[:12]}.tmp"
