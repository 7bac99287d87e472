"""Hashes of weights, rows and labels that identify a run when it is resumed."""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def fingerprint_of_weights(model: nn.Module, names: Collection[str] | None = None) -> str:
    """Return a digest, equal for two models exactly if their parameters are equal, bit for bit; or
    those of these names."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        if names is None or name in names:
            digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
            digest.update(_bytes(parameter))
    return digest.hexdigest()


def fingerprints_of_rows(batch: Mapping[str, Tensor]) -> list[bytes]:
    """Return one digest per row, whatever the batch size."""
    tensors = {name: batch[name].cpu() for name in sorted(batch)}
    rows = len(next(iter(tensors.values())))
    digests = []
    for row in range(rows):
        digest = hashlib.sha256()
        for name, tensor in tensors.items():
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape[1:])}".encode())
            digest.update(_bytes(tensor[row]))
        digests.append(digest.digest())
    return digests


def fingerprint_of_labels(labels: Sequence[Any] | None) -> str:
    return hashlib.sha256(repr(labels).encode()).hexdigest()


def fingerprint_of_tokens(data: Any, rows: int = 100) -> str:
    """Return a digest of the token ids of rows here and there.

    Of images and audio, which not all machines process to the same bit, it is one of nothing.
    """
    places = range(0, len(data), len(data) // rows + 1) if data.kind in ("text", "words") else ()
    return fingerprint_of_labels([list(data[place]["input_ids"]) for place in places])


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
