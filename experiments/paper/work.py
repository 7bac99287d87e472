"""Does parts one after the other, several at a time: each as soon as what it needs is done."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from transformers.utils import logging

from .parts import Part


def do_all(
    parts: Sequence[Part],
    needs: Callable[[Part], Sequence[Part]],
    new_study: Callable[[], Any],
    workers: int,
    stop_after: float | None = None,
) -> list[str]:
    """Do all parts, of which each stands behind what it needs; return a line on each that failed or is left.

    new_study: makes, in each process anew, what does parts; it can be pickled
    workers: how many processes; 0 does everything in this one
    stop_after: seconds after which no more is begun and workers are stopped
    """
    deadline = time.monotonic() + (stop_after or float("inf"))
    waiting = list(parts)
    done: set[Part] = set()
    failed: dict[Part, str] = {}
    team = [Worker(new_study) for _ in range(workers)] if workers else [Here(new_study)]
    try:
        while waiting or any(worker.part for worker in team):
            # What needs something that failed is lost.
            for part in list(waiting):
                lost = [need for need in needs(part) if need in failed]
                if lost:
                    failed[part] = f"needs {lost[0]}"
                    waiting.remove(part)

            # Begin what can begin, first things first.
            for worker in team:
                ready = (part for part in waiting if all(need in done for need in needs(part)))
                part = None if worker.part else next(ready, None)
                if part is not None:
                    worker.begin(part)
                    waiting.remove(part)

            # Wait for one, or for the end of the time.
            busy = [worker for worker in team if worker.part]
            for worker in first_of(busy, deadline - time.monotonic()):
                part = worker.part
                error = worker.end()
                if error is None:
                    done.add(part)
                else:
                    failed[part] = error
            if time.monotonic() >= deadline:
                break
    finally:
        left = [worker.part for worker in team if worker.part]
        for worker in team:
            worker.stop()
    lines = [f"{part} failed: {reason}" for part, reason in failed.items()]
    unfinished = [*left, *waiting]
    if unfinished:
        lines.append(f"{len(unfinished)} parts are left, the first is {unfinished[0]}: start again to go on")
    return lines


def quieten() -> None:
    """Leave out progress bars of loaded weights, which come by the thousand."""
    logging.disable_progress_bar()


class Here:
    """Does parts in this process."""

    def __init__(self, new_study: Callable[[], Any]):
        quieten()
        self.study = new_study()
        self.part: Part | None = None

    def begin(self, part: Part) -> None:
        self.part = part

    def end(self) -> str | None:
        """Do the part, and return what went wrong."""
        part = self.part
        self.part = None
        return attempt(self.study, part)

    def stop(self) -> None:
        pass


class Worker:
    """A process that does parts. One that dies loses the part it was at, and another takes its place."""

    def __init__(self, new_study: Callable[[], Any]):
        self.new_study = new_study
        self.part: Part | None = None
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, self.new_study), daemon=True)
        self.process.start()
        theirs.close()

    def begin(self, part: Part) -> None:
        self.part = part
        self.began = time.monotonic()
        self.connection.send(part)

    def end(self) -> str | None:
        """Read what became of the part: None, or what went wrong."""
        part = self.part
        self.part = None
        try:
            error = self.connection.recv()
        except (EOFError, OSError):
            error = "its process died"
            self.stop()
            self.start()
        seconds = time.monotonic() - self.began
        print(f"{time.strftime('%H:%M:%S')} {part}: {seconds:.0f} s{f', {error}' if error else ''}", flush=True)
        return error

    def stop(self) -> None:
        self.process.terminate()
        self.process.join()
        self.connection.close()


def first_of(busy: Sequence[Any], seconds: float) -> list[Any]:
    """Return those that are ready, after at most so many seconds."""
    if any(isinstance(worker, Here) for worker in busy):
        return list(busy)
    by_connection = {worker.connection: worker for worker in busy}
    timeout = None if seconds == float("inf") else max(0.0, seconds)
    return [by_connection[connection] for connection in wait(list(by_connection), timeout)]


def serve(connection: Connection, new_study: Callable[[], Any]) -> None:
    """Do parts as they come, in a process of their own."""
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    quieten()
    study = new_study()
    while True:
        try:
            part = connection.recv()
        except EOFError:  # nobody is left to ask for parts
            return
        connection.send(attempt(study, part))
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # for the other processes


def attempt(study: Any, part: Part) -> str | None:
    """Do a part; return what went wrong."""
    try:
        study.make(part)
    except Exception as error:  # one that fails loses no other
        traceback.print_exc()
        return repr(error)
    return None
