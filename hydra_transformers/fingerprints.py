"""Short names for weights and data, by which a run knows again what it left behind."""

import hashlib
from collections.abc import Mapping

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
