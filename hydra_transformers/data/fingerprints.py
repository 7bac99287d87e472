"""Hashes of weights, configs and data that identify a run when it is resumed."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig


def fingerprint_of_weights(model: nn.Module) -> str:
    """Equal for two models exactly if their parameters are equal, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


# Fields that change no output, and `kept_heads`, which a run records separately.
IGNORED_FIELDS = ("_name_or_path", "architectures", "auto_map", "dtype", "fast_inference", "id2label", "label2id")
IGNORED_FIELDS += ("aggregate", "kept_heads", "torch_dtype", "transformers_version")


def fingerprint_of_config(config: PreTrainedConfig) -> str:
    """Equal for configs that compute the same from equal weights: activations, epsilons, positions, windows."""

    def without_ignored(fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {str(name): without_ignored(value) for name, value in fields.items() if name not in IGNORED_FIELDS}

    fields = json.dumps(without_ignored(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(fields.encode()).hexdigest()


def fingerprints_of_rows(batch: Mapping[str, Tensor]) -> list[bytes]:
    """One digest per row, whatever the batch size."""
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
