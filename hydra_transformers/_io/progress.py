"""Progress bars for long tasks, on a terminal and from the fifth second on."""

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm
from transformers.utils import is_in_notebook

from .processes import rank_and_world_size


SECONDS_BEFORE_A_BAR = 5.0


def shows_bars() -> bool:
    """Whether a progress bar is seen as one: on a terminal or in a notebook, not in a file."""
    return sys.stderr.isatty() or is_in_notebook()


def progress_bar(total: int | None, name: str, unit: str, enabled: bool = True, initial: int = 0) -> tqdm:
    """Return a bar that appears after five seconds, only on a terminal, and in one process only."""
    rank, _ = rank_and_world_size()
    disable = True
    if enabled and rank == 0:
        disable = None  # tqdm then asks whether stderr is a terminal
    return tqdm(
        total=total,
        initial=initial,
        desc=name,
        unit=unit,
        delay=SECONDS_BEFORE_A_BAR,
        disable=disable,
        leave=False,
    )


def with_progress_bar(values: Iterable[Any], total: int | None, name: str, unit: str) -> Iterator[Any]:
    """Yield the values one by one, and show a bar that counts them."""
    with progress_bar(total, name, unit) as bar:
        for value in values:
            yield value
            bar.update()
