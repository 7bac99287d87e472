"""Progress bars for long tasks, on a terminal and from the fifth second on."""

from collections.abc import Iterator, Sequence
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


class CountedBatches(list):
    """A list of batches that moves a bar by one with every batch that is read."""

    def __init__(self, batches: Sequence[Any], bar: tqdm):
        super().__init__(batches)
        self.bar = bar

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            yield batch
            self.bar.update()
