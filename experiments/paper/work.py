"""Does parts one after the other, several at a time: each as soon as what it needs is done."""

import multiprocessing
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch
from transformers.utils import logging

from .parts import Part


STUDY: Any = None  # of a worker


def start_worker(new_study: Callable[[], Any]) -> None:
    """Prepare a process: one thread, and data that are read with the first part."""
    global STUDY
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    quieten()
    STUDY = new_study()


def quieten() -> None:
    """Leave out progress bars of loaded weights, which come by the thousand."""
    logging.disable_progress_bar()


def do(part: Part) -> float:
    """Do one part in a worker; return how many seconds it took."""
    began = time.perf_counter()
    STUDY.make(part)
    torch.cuda.empty_cache()  # for the other workers
    return time.perf_counter() - began


def do_all(
    parts: Sequence[Part],
    needs: Callable[[Part], Sequence[Part]],
    new_study: Callable[[], Any],
    workers: int,
    stop_after: float | None = None,
) -> list[str]:
    """Do all parts, of which each stands behind what it needs; return a line on each that failed or is left.

    workers: how many processes; 0 does everything in this one
    stop_after: seconds after which no more is begun and workers are stopped
    """
    if workers == 0:
        quieten()
        return do_here(parts, needs, new_study())
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, start_worker, (new_study,))
    deadline = time.monotonic() + (stop_after or float("inf"))
    waiting = list(parts)
    running: dict[Future, Part] = {}
    done: set[Part] = set()
    failed: dict[Part, str] = {}
    while waiting or running:
        # Begin what can begin, first things first.
        for part in list(waiting):
            lost = [need for need in needs(part) if need in failed]
            if lost:
                failed[part] = f"needs {lost[0]}"
                waiting.remove(part)
            elif len(running) < workers and all(need in done for need in needs(part)):
                running[pool.submit(do, part)] = part
                waiting.remove(part)

        # Wait for one, or for the end of the time.
        left = deadline - time.monotonic()
        ended, _ = wait(running, timeout=max(0.0, left) if stop_after else None, return_when=FIRST_COMPLETED)
        for future in ended:
            part = running.pop(future)
            error = future.exception()
            if error is None:
                done.add(part)
                print(f"{time.strftime('%H:%M:%S')} {part}: {future.result():.0f} s", flush=True)
            else:
                failed[part] = repr(error)
                traceback.print_exception(error)
        if time.monotonic() >= deadline:
            break
    if waiting or running:
        for process in list(pool._processes.values()):
            process.terminate()
    pool.shutdown(wait=True, cancel_futures=True)
    lines = [f"{part} failed: {reason}" for part, reason in failed.items()]
    return lines + [f"{part} is left: start again to go on" for part in (*running.values(), *waiting)]


def do_here(parts: Sequence[Part], needs: Callable[[Part], Sequence[Part]], study: Any) -> list[str]:
    failed: dict[Part, str] = {}
    for part in parts:
        lost = [need for need in needs(part) if need in failed]
        if lost:
            failed[part] = f"needs {lost[0]}"
            continue
        try:
            study.make(part)
        except Exception as error:  # one that fails loses no other
            traceback.print_exc()
            failed[part] = repr(error)
    return [f"{part} failed: {reason}" for part, reason in failed.items()]
