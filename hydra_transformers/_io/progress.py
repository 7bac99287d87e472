"""Progress of long tasks: a bar on a terminal, and lines in a log."""

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm.auto import tqdm
from transformers.utils.import_utils import is_in_notebook

from .processes import rank_and_world_size


SECONDS_BEFORE_A_BAR = 5.0
SECONDS_BEFORE_A_LINE = 10.0
MOST_SECONDS_BETWEEN_LINES = 600.0


def shows_bars() -> bool:
    """Whether a progress bar is seen as one: on a terminal or in a notebook, not in a file."""
    return sys.stderr.isatty() or is_in_notebook()


def in_words(seconds: float) -> str:
    """Return a time in the unit that people would use.

    >>> [in_words(seconds) for seconds in (0.2, 59, 61, 3_000, 5_400)]
    ['1 second', '59 seconds', '1 minute', '50 minutes', '1.5 hours']
    """
    if seconds >= 3_600:
        return f"{seconds / 3_600:.1f} hours"
    unit = "second"
    count = max(1, round(seconds))
    if count >= 60:
        unit = "minute"
        count = round(seconds / 60)
    return f"{count} {unit}{'s' if count > 1 else ''}"


class ProgressLines:
    """Lines in a log about a task of more than ten seconds, at growing distances.

    It is used as a bar of tqdm is.
    """

    def __init__(self, total: int | None, name: str, unit: str, initial: int = 0):
        self.total = total
        self.name = name
        self.unit = unit
        self.first = initial
        self.count = initial
        self.started = time.monotonic()
        self.next_line = SECONDS_BEFORE_A_LINE

    def __enter__(self) -> "ProgressLines":
        return self

    def __exit__(self, kind: type | None, *_: Any) -> None:
        seconds = time.monotonic() - self.started
        if kind is None and seconds >= SECONDS_BEFORE_A_LINE:
            self._print(f"{self._units(self.count)} in {in_words(seconds)}")

    def set_description(self, name: str) -> None:
        self.name = name

    def set_postfix(self, **_: Any) -> None:
        """A line has no place for it."""

    def update(self, count: int = 1) -> None:
        self.count += count
        seconds = time.monotonic() - self.started
        if seconds < self.next_line or self.count == self.total:
            return
        self.next_line = seconds + min(seconds, MOST_SECONDS_BETWEEN_LINES)
        if self.total is None:
            self._print(f"{self._units(self.count)} after {in_words(seconds)}")
            return
        left = seconds / (self.count - self.first) * (self.total - self.count)
        self._print(f"{self.count:,} of {self._units(self.total)}, {in_words(left)} left")

    def _units(self, count: int) -> str:
        if count == 1:
            return f"1 {self.unit}"
        ending = "es" if self.unit.endswith("ch") else "s"  # batches, rows
        return f"{count:,} {self.unit}{ending}"

    def _print(self, text: str) -> None:
        print(f"{self.name}: {text}", file=sys.stderr, flush=True)


def progress_bar(
    total: int | None, name: str, unit: str, enabled: bool = True, initial: int = 0
) -> "tqdm | ProgressLines":
    """Return a bar that appears after five seconds, in one process only; in a log, lines."""
    rank, _ = rank_and_world_size()
    is_seen = enabled and rank == 0
    if is_seen and not shows_bars():
        return ProgressLines(total, name, unit, initial)
    return tqdm(
        total=total,
        initial=initial,
        desc=name,
        unit=unit,
        delay=SECONDS_BEFORE_A_BAR,
        disable=not is_seen,
        leave=False,
    )


def with_progress_bar(values: Iterable[Any], total: int | None, name: str, unit: str) -> Iterator[Any]:
    """Yield the values one by one, and show a bar that counts them."""
    with progress_bar(total, name, unit) as bar:
        for value in values:
            yield value
            bar.update()


@contextmanager
def timed_step(name: str) -> Iterator[None]:
    """Print how long a step without a bar took, if it took more than ten seconds."""
    started = time.monotonic()
    yield
    seconds = time.monotonic() - started
    rank, _ = rank_and_world_size()
    if rank == 0 and seconds >= SECONDS_BEFORE_A_LINE:
        print(f"{name}: {in_words(seconds)}", file=sys.stderr, flush=True)
