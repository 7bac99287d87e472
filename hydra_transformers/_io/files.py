"""Writes files and folders whole or not at all.

Unfinished ones are called `.NAME.ID.tmp` with a random id. Each is removed by the call that made it
and by nothing else: a file of a user, or of another process, is never taken for one.
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
# Removed before a model is written over another one, which may have had another number of files:
# Transformers would read what is left of them.
WEIGHTS = "model*.safetensors*"


def write_atomically(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write a temporary file and rename it to `path`; follow symlinks, create missing folders."""
    target = Path(os.path.realpath(path))
    target.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        content = content.encode()

    unfinished = unfinished_path(target.parent, target.name)
    try:
        unfinished.write_bytes(content)
        os.replace(unfinished, target)
    finally:
        unfinished.unlink(missing_ok=True)
    return Path(path)


def parse_json(content: bytes) -> Any:
    """Return the content of a JSON file.

    Raises `ValueError` for anything wrong with it: not text, not JSON, nested too deep.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@contextmanager
def written_whole(folder: str | os.PathLike) -> Iterator[Path]:
    """Yield a temporary folder to write into, which becomes `folder` at the end of the block.

    If `folder` exists, the files are moved into it: those of the same names are replaced, and a
    model replaces the weights of another one. `config.json` is removed first and written last.
    Other files stay.
    """
    folder = Path(os.path.realpath(folder))
    is_new = not folder.exists()
    # An existing folder may be a mount point, and renames work within one file system only: its
    # files are written inside it.
    beside = folder.parent if is_new else folder
    unfinished = unfinished_path(beside, folder.name)
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
    """Move the files of a folder into another one, `LAST` last."""
    if (source / LAST).exists():
        for replaced in (target / LAST, *target.glob(WEIGHTS)):
            replaced.unlink(missing_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == LAST):
        new_path = target / path.name
        if path.is_dir() and new_path.is_dir():
            _move(path, new_path)
        else:
            os.replace(path, new_path)


def check_takes_files(folder: str | os.PathLike) -> None:
    """Raise, before any work, for a folder that could not be made or written into."""
    path = Path(os.path.realpath(folder))
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(f"{folder} cannot be written into ({error.strerror}: {existing}): pass another") from error


def unfinished_path(folder: Path, name: str) -> Path:
    """Return a path in `folder` that nothing else has."""
    random_id = uuid.uuid4().hex[:12]
    return folder / f".{name}.{random_id}.tmp"
