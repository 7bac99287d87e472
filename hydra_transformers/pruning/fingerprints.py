"""Short names for weights and data, by which a checkpoint knows whether it belongs to a run; and files written whole."""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn


def fingerprint_of_weights(model: nn.Module) -> str:
    """The same for two models exactly if they have the same parameters, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


def fingerprints_of_rows(batch: Mapping[str, Tensor]) -> list[bytes]:
    """One digest per row, so that the way rows are put into batches leaves no trace."""
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


def fingerprint_of_rows(digests: list[bytes]) -> str:
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def write_atomically(path: str | os.PathLike, content: str) -> None:
    """Writes beside `path` first and then puts the file in place: it is there whole or not at all."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_text(content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
