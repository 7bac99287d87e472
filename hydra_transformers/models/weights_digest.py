"""Detect changed weights: digests of their bits, and which tensors stand where."""

import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


WORDS_PER_PASS = {"cpu": 2**16}  # fits a processor's cache; elsewhere 2**22, which bounds the memory
# Odd, of splitmix64.
POSITION = -0x61C8864680B583EB
FIRST = -0x40A7B892E31B1A47
SECOND = -0x6B2FB644ECCEEE15


class ComparedWeights:
    """Notices weights that were replaced since they were compared, as quantisers do in place."""

    def __init__(self, model: nn.Module | None):
        self.places = []
        if model is not None:
            for module in model.modules():
                for name, weight in module._parameters.items():
                    self.places.append((module._parameters, name, weight))

    def are_in_place(self) -> bool:
        return bool(self.places) and all(owner.get(name) is weight for owner, name, weight in self.places)

    def __reduce__(self) -> tuple:
        """Have a copied or pickled model compared anew."""
        return type(self), (None,)


@torch.no_grad()
def digest_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> str:
    """Return a digest of every bit of the tensors and its place, the same on every device.

    dtype: as if they were cast to it; those that are no finer stay as they are
    """
    digest = hashlib.sha256()
    sums = []
    for tensor in _plain(tensors):
        target = tensor.dtype
        if dtype is not None and tensor.is_floating_point() and _eps(tensor.dtype) < _eps(dtype):
            target = dtype
        digest.update(f"{tuple(tensor.shape)} {target} ".encode())
        sums.append(_mixed_sum(tensor.reshape(-1), target))
    for total in sums:  # all are under way on a GPU before the first is waited for
        digest.update(f"{int(total)} ".encode())
    return digest.hexdigest()


def _mixed_sum(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each 64-bit word, mixed with its place, modulo 2^64."""
    words = WORDS_PER_PASS.get(values.device.type, 2**22)
    bytes_per_pass = 8 * words
    places = torch.arange(words, device=values.device) * POSITION
    total = torch.zeros((), dtype=torch.int64, device=values.device)
    start = 0
    for part in values.split(bytes_per_pass // dtype.itemsize):
        # The words, the last one filled up with zeros.
        part = part.to(dtype).view(torch.uint8)
        part = nn.functional.pad(part, (0, -len(part) % 8)).view(torch.int64)

        # splitmix64 of each word and its place.
        first = (start * POSITION + 2**63) % 2**64 - 2**63  # as int64 wraps around, so that passes of any size agree
        mixed = places[: len(part)].add(first).add_(part).mul_(FIRST)
        mixed.bitwise_xor_(mixed >> 32).mul_(SECOND)
        total += mixed.bitwise_xor_(mixed >> 29).sum()
        start += len(part)
    return total


def _plain(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield the tensors that hold numbers, also inside of others (torchao's, distributed ones)."""
    for tensor in tensors:
        if hasattr(tensor, "__tensor_flatten__"):
            names, _ = tensor.__tensor_flatten__()
            yield from _plain(getattr(tensor, name) for name in names)
        else:
            yield tensor.detach()


def _eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def dtype_of(weights: list[Tensor]) -> str | None:
    """Return the dtype of most floating-point weights: "float32"."""
    names = [str(weight.dtype).removeprefix("torch.") for weight in weights if weight.is_floating_point()]
    return max(set(names), key=names.count, default=None)


def is_coarser(dtype: str | None, other: str | None) -> bool:
    """Whether a dtype of `dtype_of` rounds more than another one; False where one of them is not
    known."""
    if dtype is None or other is None:
        return False
    return _eps(getattr(torch, dtype)) > _eps(getattr(torch, other))


def weights_of_replica(model: nn.Module) -> list[Tensor]:
    """Return the weights of a copy by `nn.DataParallel`, which are plain tensors, in the order of
    `model.parameters()`."""
    weights = {}
    for module in model.modules():
        for weight in vars(module).get("_former_parameters", {}).values():
            if weight is not None:
                weights.setdefault(id(weight), weight)  # once, where modules share it
    return list(weights.values())
