"""Processes for tests that kill one, or let two work together.

They are forks of a server that has imported the package: a process started from nothing spends ten seconds on imports.
"""

import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch


CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.training.child", "tests.pruning.worker", "hydra_transformers.cli"])


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
