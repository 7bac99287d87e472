"""Writes files and folders whole or not at all."""

import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# What is being written lies beside its place as `.NAME.PID-THREAD.tmp`, and a folder that another takes the place of as `.NAME.PID.old`.
UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)(-\d+)?\.tmp")
REPLACED = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.old")


def write_atomically(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write `content` beside `path` first, then put it in place, behind a symlink too; missing folders are made."""
    place = Path(os.path.realpath(path))
    place.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(place.parent, place.name)
    unfinished = _unfinished(place.parent, place.name)
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, place)
    finally:
        unfinished.unlink(missing_ok=True)
    return Path(path)


def parse_json(content: bytes) -> Any:
    """The content of a JSON file; a ValueError whatever is wrong with it (no text, no JSON, nested too deep)."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@contextmanager
def written_whole(folder: str | os.PathLike) -> Iterator[Path]:
    """A folder to write into, whose files are those of `folder` once everything is written.

    A folder that others hold on to stays, and is filled: an empty one, the working directory, a mount point. Its
    `config.json`, by which a model is known to be there, goes first and comes last. Any other is replaced at once, behind a
    symlink too: a process that is killed leaves the one or the other, whole.
    """
    folder = Path(os.path.realpath(folder))
    _put_back(folder)
    remove_leftovers(folder.parent, folder.name)
    remove_leftovers(folder)
    is_filled = folder.is_dir() and (folder == Path.cwd() or folder.is_mount() or not any(folder.iterdir()))
    unfinished = _unfinished(folder if is_filled else folder.parent, folder.name)
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed and had this one's number
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        if is_filled:
            for path in sorted(set(folder.iterdir()) - {unfinished}, key=lambda path: path.name != "config.json"):
                _remove(path)
            for path in sorted(unfinished.iterdir(), key=lambda path: path.name == "config.json"):
                os.replace(path, folder / path.name)
        else:
            _replace_folder(folder, unfinished)
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


def _replace_folder(folder: Path, new: Path) -> None:
    """Puts `new` in the place of `folder`, which is removed no sooner than that has worked."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        os.replace(folder, old)
    try:
        os.replace(new, folder)
    except BaseException:
        if old.exists():
            os.replace(old, folder)
        raise
    _remove(old)


def _put_back(folder: Path) -> None:
    """A process that was killed while it replaced a folder may have left the old one beside its place."""
    for path in list(folder.parent.iterdir()) if folder.parent.is_dir() else []:
        parts = REPLACED.fullmatch(path.name)
        if parts is None or parts["name"] != folder.name or _is_running(int(parts["process"])):
            continue
        if folder.exists():
            _remove(path)
        else:
            os.replace(path, folder)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _unfinished(folder: Path, name: str) -> Path:
    return folder / f".{name}.{os.getpid()}-{threading.get_ident()}.tmp"


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
