"""Hashes of weights, rows and labels that identify a run when it is resumed."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .columns import values_of
from .processors import preparation_of


if TYPE_CHECKING:
    from .loading import PreparedData


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
    """Return a digest of the labels of all rows."""
    return hashlib.sha256(repr(labels).encode()).hexdigest()


def fingerprint_of_texts(data: "PreparedData") -> str:
    """Return a digest of all texts of data, before they are processed."""
    digest = hashlib.sha256()
    for column in data.columns:
        for value in values_of(data.rows, column):
            digest.update(repr(value).encode())
    return digest.hexdigest()


def fingerprint_of_tokenizer(tokenizer: Any, max_length: int | None) -> str:
    """Return a digest of what decides the tokens of a text."""
    settings = {"max_length": max_length, **preparation_of(tokenizer)}
    written = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(written.encode()).hexdigest()


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
