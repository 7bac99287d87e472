"""A folder that one writer at a time may use."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None
    try:
        import msvcrt
    except ImportError:
        msvcrt = None


LOCK = ".lock"
BEHIND_THE_TEXT = 1 << 30  # where msvcrt locks a byte, so that others can read who holds the file

_held: set[int] = set()  # the descriptors of this process's locks


@contextmanager
def only_writer(folder: str | os.PathLike) -> Iterator[None]:
    """Keeps other processes, and other threads, that ask for the same folder out of it; they get a `RuntimeError`.

    The operating system holds the lock for this process and ends it with the process, however that ends: a file that a
    killed process leaves behind locks nothing. Processes forked from this one do not hold it.
    """
    path, owner = Path(folder) / LOCK, os.getpid()
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _acquire(path)
    _held.add(descriptor)
    try:
        yield
    finally:
        if os.getpid() == owner:
            _held.discard(descriptor)
            with suppress(OSError):  # Windows does not remove an open file; it locks nothing when it stays
                path.unlink()
            os.close(descriptor)


def _acquire(path: Path) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, path)
            # The one who held it before removes the file: what was locked may no longer be what others find.
            if _is_in_place(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.lseek(descriptor, 0, os.SEEK_SET)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif msvcrt is not None:
            os.lseek(descriptor, BEHIND_THE_TEXT, os.SEEK_SET)
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
        else:
            raise OSError("this system has no file locks")
    except (BlockingIOError, PermissionError) as error:
        raise RuntimeError(
            f"{path.parent} is being written by {_holder(path)}: wait until that has ended, or pass another folder"
        ) from error
    except OSError as error:
        raise RuntimeError(
            f"{path.parent} cannot be kept to one writer ({error}): pass a folder on a disk that has file locks"
        ) from error


def _holder(path: Path) -> str:
    with suppress(OSError):
        if text := path.read_text(errors="replace").strip("\0 \n"):
            return text
    return "another process"


def _is_in_place(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _let_go_in_child() -> None:
    """A forked process, such as one that loads data, would otherwise keep the lock of a parent that was killed."""
    for descriptor in _held:
        with suppress(OSError):
            os.close(descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_in_child)
