"""A folder is written by one process at a time, and a lock ends with its process."""

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hydra_transformers._io import folder_lock
from hydra_transformers._io.folder_lock import LOCK, only_writer


# Holds a folder, and, where asked to, forks a process that outlives it, as one that loads data may.
HOLDER = """
import importlib.util, os, sys

spec = importlib.util.spec_from_file_location("folder_lock", sys.argv[1])  # without the package, whose import takes seconds
folder_lock = importlib.util.module_from_spec(spec)
spec.loader.exec_module(folder_lock)

with folder_lock.only_writer(sys.argv[2]):
    if len(sys.argv) > 3 and os.fork() == 0:
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    print("held", flush=True)
    sys.stdin.read()
"""


def start_holder(folder: Path, *arguments: str) -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, folder_lock.__file__, str(folder), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    for _ in range(1 + len(arguments)):
        assert process.stdout.readline()
    return process


def test_another_process_is_kept_out_until_the_first_has_ended(tmp_path):
    holder = start_holder(tmp_path)
    message = rf"{tmp_path} is being written by process {holder.pid} on .*: wait until that has ended"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message), only_writer(tmp_path):
            pass
    holder.communicate()
    with only_writer(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_gone_with_it(tmp_path):
    holder = start_holder(tmp_path)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    with only_writer(tmp_path):
        pass


def test_a_process_that_outlives_its_killed_parent_holds_nothing(tmp_path):
    holder = start_holder(tmp_path, "fork")
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with only_writer(tmp_path):
        pass
    holder.stdin.close()


def test_another_thread_is_kept_out_too(tmp_path):
    refused = []

    def enter():
        try:
            with only_writer(tmp_path):
                pass
        except RuntimeError as error:
            refused.append(str(error))

    with only_writer(tmp_path):
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
    assert len(refused) == 1 and f"process {os.getpid()}" in refused[0]
    enter()
    assert len(refused) == 1


@pytest.mark.slow
def test_of_many_that_come_at_once_one_is_inside(tmp_path):
    """Coming and going removes the file again and again, which must let nobody in beside another."""
    inside, most = 0, 0

    def come_and_go():
        nonlocal inside, most
        for _ in range(200):
            try:
                with only_writer(tmp_path):
                    inside += 1
                    most = max(most, inside)
                    inside -= 1
            except RuntimeError:
                pass

    threads = [threading.Thread(target=come_and_go) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1


def test_an_error_inside_ends_the_lock(tmp_path):
    with pytest.raises(KeyError), only_writer(tmp_path):
        raise KeyError
    with only_writer(tmp_path):
        pass


def test_a_system_without_locks_is_refused(tmp_path, monkeypatch):
    def flock(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(RuntimeError, match=r"cannot be kept to one writer \(.*Function not implemented"):
        only_writer(tmp_path).__enter__()
