"""Writes files and folders whole or not at all."""

import json
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


# Unfinished files and folders are called `.NAME.PID-THREAD.tmp`, and a folder that is being replaced `.NAME.PID.old`.
UNFINISHED = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)(-\d+)?\.tmp")
REPLACED = re.compile(r"\.(?P<name>.+)\.(?P<process>\d+)\.old")


def write_atomically(path: str | os.PathLike, content: str | bytes) -> Path:
    """Writes `content` to a temporary file and renames it to `path`; follows symlinks, creates missing folders."""
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
    """The content of a JSON file; a ValueError for anything wrong with it (not text, not JSON, nested too deep)."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@contextmanager
def written_whole(folder: str | os.PathLike) -> Iterator[Path]:
    """A temporary folder to write into, which becomes `folder` at the end of the block.

    An existing folder is replaced in one step, behind a symlink too: a killed process leaves the old one or the new one, whole.
    A folder that must stay (an empty one, the working directory, a mount point) is filled instead; its `config.json`, the
    sign of a model, is removed first and written last.
    """
    folder = Path(os.path.realpath(folder))
    _put_back(folder)
    remove_leftovers(folder.parent, folder.name)
    remove_leftovers(folder)
    is_filled = folder.is_dir() and (folder == Path.cwd() or folder.is_mount() or not any(folder.iterdir()))
    unfinished = _unfinished(folder if is_filled else folder.parent, folder.name)
    shutil.rmtree(unfinished, ignore_errors=True)  # from a killed process with the same number
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


def check_takes_files(folder: str | os.PathLike) -> None:
    """Refuses, before any work, a folder that could not be made or written into."""
    place = Path(os.path.realpath(folder))
    existing = next(path for path in (place, *place.parents) if path.exists())
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise ValueError(
            f"{folder} cannot be written into ({error.strerror}: {existing}): pass another --output"
        ) from error


def remove_leftovers(folder: str | os.PathLike, name: str | None = None) -> None:
    """Removes the unfinished files (of this name, if given) that ended processes left in `folder`."""
    folder = Path(folder)
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        parts = UNFINISHED.fullmatch(path.name)
        if parts is None or name not in (None, parts["name"]) or _is_running(int(parts["process"])):
            continue
        _remove(path)


def _replace_folder(folder: Path, new: Path) -> None:
    """Renames `new` to `folder`, and removes the old folder afterwards."""
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
    """Restores the old folder that a process left behind when it was killed while replacing it."""
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
        return True  # elsewhere os.kill could end the process
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass  # it is another user's
    return True
