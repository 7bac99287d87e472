"""Keeps a folder to one writer at a time."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout


LOCK = ".lock"


@contextmanager
def only_writer(folder: str | os.PathLike) -> Iterator[None]:
    """Locks a folder; other processes and threads that try to lock it get a `RuntimeError`.

    The operating system ends the lock with the process: a file that a killed process leaves behind locks nothing. Forked
    processes do not hold it.
    """
    path, owner = Path(folder) / LOCK, os.getpid()
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path, blocking=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout as error:
        raise RuntimeError(
            f"{path.parent} is being written by {_holder(path)}: wait until that has ended, or pass another folder"
        ) from error
    except (OSError, NotImplementedError) as error:
        raise RuntimeError(
            f"{path.parent} cannot be kept to one writer ({error}): pass a folder on a disk that has file locks"
        ) from error
    with suppress(OSError):  # Windows lets nobody write into a locked file
        path.write_text(f"process {owner} on {socket.gethostname()}")
    try:
        yield
    finally:
        if os.getpid() == owner:
            with suppress(OSError):  # Windows does not remove an open file; it locks nothing when it stays
                path.unlink()
            lock.release()


def _holder(path: Path) -> str:
    with suppress(OSError):
        if text := path.read_text(errors="replace").strip():
            return text
    return "another process"
