"""Progress bars for long tasks, on a terminal and from the fifth second on."""

from collections.abc import Iterable, Iterator
from typing import Any

from tqdm.auto import tqdm

from .processes import rank_and_world_size


SECONDS_BEFORE_A_BAR = 5.0


def progress_bar(total: int | None, name: str, unit: str, enabled: bool = True, initial: int = 0) -> tqdm:
    """A bar that appears after five seconds, only on a terminal, and only in the first of several processes."""
    enabled = enabled and rank_and_world_size()[0] == 0
    return tqdm(
        total=total,
        initial=initial,
        desc=name,
        unit=unit,
        delay=SECONDS_BEFORE_A_BAR,
        disable=None if enabled else True,
        leave=False,
    )


def with_progress_bar(values: Iterable[Any], total: int | None, name: str, unit: str) -> Iterator[Any]:
    """The values one by one, and a bar that counts them."""
    with progress_bar(total, name, unit) as bar:
        for value in values:
            yield value
            bar.update()
