"""Shares work between processes that were started together (`torchrun`, `accelerate launch`).

With torch.distributed itself: accelerate's `gather_object` silently returns one process's part
unless certain environment variables were set.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler, IterableDataset, SequentialSampler


# The rows in the order of the data set; by exact type, as a subclass may shuffle.
COMMON_SAMPLERS = (SequentialSampler, BatchSampler)
LONGEST_WAIT = timedelta(days=30)  # one process may work for days while the others have finished

# The group of all processes, and the group that `gather` uses in its place.
_waiting: tuple[Any, Any] = (None, None)


def rank_and_world_size() -> tuple[int, int]:
    """Return this process's rank and the number of processes; (0, 1) outside torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def check_can_be_shared(data: Any, name: str) -> None:
    """Raise for a loader whose order may differ between processes: they take turns with batches.

    Only the order of the data set, or of its stream, is safe. Any other sampler could give one
    sample twice and another never.
    """
    _, world_size = rank_and_world_size()
    if world_size == 1:
        return

    # Loaders that give each process its own part already.
    batch_sampler = getattr(data, "batch_sampler", None)
    samplers = [getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    prepared_by_accelerate = any(cls.__module__ == "accelerate.data_loader" for cls in type(data).__mro__)
    if prepared_by_accelerate or any(isinstance(sampler, DistributedSampler) for sampler in samplers):
        raise ValueError(f"{name} is already split between the processes: pass all data to each, it is split here")

    # Loaders that may shuffle.
    if isinstance(getattr(data, "dataset", None), IterableDataset):
        return
    for sampler in samplers:
        if sampler is not None and type(sampler) not in COMMON_SAMPLERS:
            raise ValueError(
                f"{name} may be shuffled (its sampler is a {type(sampler).__name__}), so {world_size} processes "
                "cannot share it: pass shuffle=False, and for a part of the rows a torch.utils.data.Subset that is "
                "the same in each"
            )


def gather(value: Any) -> list[Any]:
    """Return the values of all processes, in the order of their ranks, in every process."""
    _, world_size = rank_and_world_size()
    if world_size == 1:
        return [value]
    gathered = [None] * world_size
    dist.all_gather_object(gathered, value, group=_waiting_group())
    return gathered


def _waiting_group() -> Any:
    """Return a group of all processes, over their CPUs, that waits as long as one of them works.

    The default group gives up after some minutes, while one process may work for hours.
    """
    global _waiting
    if _waiting[0] is not dist.group.WORLD:
        group = None
        if dist.is_gloo_available():
            group = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
        _waiting = (dist.group.WORLD, group)
    return _waiting[1]


def from_first_process(value: Any) -> Any:
    """Return the value of the process of rank 0, in every process."""
    _, world_size = rank_and_world_size()
    if world_size == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0, group=_waiting_group())
    return values[0]


def raise_everywhere(error: Exception | None) -> None:
    """Raise the error of any process in all: the others would wait for one that stopped alone."""
    for failure in gather(error):
        if failure is not None:
            failure.is_everywhere = True  # the command line prints it once
            raise failure


def on_one_process(act: Callable[[], Any]) -> Any:
    """Call `act` in the first process and let the others wait; raise its errors in all of them.

    Returns the result, in the others None.
    """
    rank, _ = rank_and_world_size()
    result = None
    error = None
    if rank == 0:
        try:
            result = act()
        except Exception as failure:
            error = failure
    raise_everywhere(error)
    return result


def gather_batches(parts: list[Any]) -> list[Any]:
    """Return the results of all batches, in order.

    Process r of W has those of the batches r, r + W, r + 2W, ...
    """
    parts_of_ranks = gather(parts)
    world_size = len(parts_of_ranks)
    num_batches = sum(map(len, parts_of_ranks))
    return [parts_of_ranks[batch % world_size][batch // world_size] for batch in range(num_batches)]
