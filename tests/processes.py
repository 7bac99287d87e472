"""Processes for tests that kill one, or let two work together.

They are forks of a server, which is a fork of the process of the tests: made when that has imported everything, which takes ten
seconds, and before it runs anything.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from unittest.mock import patch

import torch


CONTEXT = multiprocessing.get_context("forkserver")


def _run_in_fork(python: str, words: list[str], files: list[int]) -> int:
    """Runs the program at the end of `words` in a fork that has these files alone: an open end of a pipe says that somebody may
    still write."""
    if child := os.fork():
        return child
    try:
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number in {*map(int, os.listdir("/dev/fd"))} - {0, 1, 2, nowhere, *files}:
            os.dup2(nowhere, number)
        sys.stdin, sys.stdout, sys.stderr = sys.__stdin__, sys.__stdout__, sys.__stderr__
        exec(words[-1])
    finally:
        os._exit(0)


@patch("multiprocessing.util.spawnv_passfds", _run_in_fork)  # which would start it from nothing
@patch("multiprocessing.resource_tracker.ensure_running", lambda: None)  # the first process does that
def start_fork_server() -> None:
    forkserver.ensure_running()


def start(
    log: Path, function: Callable[..., None], *arguments, environment: Mapping[str, str] | None = None
) -> BaseProcess:
    """A process that calls `function`, of a module that it can import; what it prints goes to `log`."""
    process = CONTEXT.Process(target=_run, args=(log, dict(environment or {}), function, arguments), daemon=True)
    process.start()
    return process


def fix_arithmetic() -> None:
    """The same work gives the same bits in every process: sums of one thread have one order. On ARM some products fail in oneDNN,
    and torch then turns it off for the rest of the process: here it is off from the beginning."""
    torch.set_num_threads(1)
    torch.backends.mkldnn.set_flags(_enabled=False)


def exit_code(process: BaseProcess, seconds: float = 300) -> int:
    """Waits for the end of a process: -9 where it was killed."""
    process.join(seconds)
    assert process.exitcode is not None, f"{process.name} has not ended after {seconds} seconds"
    return process.exitcode


def _run(log: Path, environment: dict[str, str], function: Callable[..., None], arguments: tuple) -> None:
    os.environ.update(environment)
    with log.open("wb") as file:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(file.fileno(), stream.fileno())
    fix_arithmetic()
    function(*arguments)
    sys.stdout.flush()
