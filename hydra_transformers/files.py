"""Files and folders that are either there whole or not at all."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# What is being written lies beside its place as `.NAME.PID.tmp`.
UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.tmp")


def write_atomically(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write `content` beside `path` first, then put it in place; missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    unfinished = _unfinished(path.parent, path.name)
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def parse_json(content: bytes) -> Any:
    """What a JSON file holds; a ValueError whatever is wrong with it (no text, no JSON, nested too deep)."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@contextmanager
def written_whole(folder: str | os.PathLike) -> Iterator[Path]:
    """A folder to write into, whose files are those of `folder` once everything is written.

    A folder that others hold on to stays, and is filled: an empty one, the working directory, a mount point. Its
    `config.json`, by which a model is known to be there, comes last. Any other is replaced at once, behind a symlink too.
    """
    folder = Path(os.path.realpath(folder))
    remove_leftovers(folder.parent, folder.name)
    remove_leftovers(folder)
    is_filled = folder.is_dir() and (folder == Path.cwd() or folder.is_mount() or not any(folder.iterdir()))
    unfinished = _unfinished(folder if is_filled else folder.parent, folder.name)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed and had this one's number
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if is_filled:
            for path in set(folder.iterdir()) - {unfinished}:
                _remove(path)
            for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(path, folder / path.name)
        else:
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_leftovers(folder: str | os.PathLike, name: str | None = None) -> None:
    """Removes what processes that are gone left unfinished in `folder`; where a name is given, of that name alone."""
    folder = Path(folder)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        parts = UNFINISHED.fullmatch(path.name)
        if parts is None or name not in (None, parts["name"]) or _is_running(int(parts["process"])):
            continue
        _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unfinished(folder: Path, name: str) -> Path:
    return folder / f".{name}.{os.getpid()}.tmp"


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # elsewhere the question itself could end the process
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        return True
    return True
