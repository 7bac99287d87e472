"""Work shared between processes that were started together (`torchrun`, `accelerate launch`)."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank_and_world_size() -> tuple[int, int]:
    """(0, 1) outside `torch.distributed`."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gather(value: Any) -> list[Any]:
    """What each process has, in the order of their ranks, in every process."""
    _, world_size = rank_and_world_size()
    if world_size == 1:
        return [value]
    gathered = [None] * world_size
    dist.all_gather_object(gathered, value)
    return gathered


def from_first_process(value: Any) -> Any:
    """What the process of rank 0 has, in every process."""
    return gather(value)[0]


def gather_batches(parts: list[Any]) -> list[Any]:
    """What was made of each batch, in the order of the batches: process r made those of the batches r, r + W, ..."""
    of_ranks = gather(parts)
    world_size = len(of_ranks)
    return [of_ranks[batch % world_size][batch // world_size] for batch in range(sum(map(len, of_ranks)))]


def gather_samples(values: Tensor, batch_sizes: list[int]) -> Tensor:
    """(candidates, samples of this process's batches) -> (candidates, samples), in the order of the batches."""
    if rank_and_world_size()[1] == 1:
        return values
    parts = gather_batches([part.clone() for part in values.cpu().split(batch_sizes, dim=1)])
    return torch.cat(parts, dim=1)
