"""Hashes of weights, configs and data that identify a run when it is resumed."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import PreTrainedConfig


ROWS_IN_SAMPLE = 64


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


def fingerprint_of_data(data: Any, in_worker: bool = False) -> dict[str, Any]:
    """How many rows `data` has (None if unknown) and a digest of a sample of them.

    data: what `Trainer` takes: rows that can be indexed or iterated over, or a dict of several such sets
    in_worker: read the rows in another process, as a `DataLoader` with workers does: workers must not share a file that a
        set opens with its first row

    The sample is the same in every process. Each row is read twice, with the same random numbers, so that random crops and
    flips are drawn alike; an entry that still differs counts by its name alone.
    """
    if isinstance(data, Mapping):
        return {str(name): fingerprint_of_data(part, in_worker) for name, part in data.items()}
    settings = {"num_workers": int(in_worker), "generator": torch.Generator()}  # not the global generator
    [digest] = DataLoader([data], batch_size=None, collate_fn=_digest_of_sample, **settings)
    return {"rows": _number_of_rows(data), "sample": digest}


def _digest_of_sample(data: Any) -> str:
    digest = hashlib.sha256()
    for first, second in zip_longest(_read_sample(data), _read_sample(data), fillvalue={}):
        digest.update(f"row of {len(first)}".encode())
        for name in sorted(first):
            digest.update(name.encode())
            digest.update(first[name] if first[name] == second.get(name) else b"changes")
    return digest.hexdigest()


def _read_sample(data: Any) -> list[dict[str, bytes]]:
    """The digests of each sampled row's entries."""
    count = _number_of_rows(data)
    with _same_random_numbers():
        if isinstance(data, Iterator):
            rows = ()  # it can be read only once
        elif count is None or not hasattr(data, "__getitem__"):
            rows = islice(iter(data), ROWS_IN_SAMPLE)
        else:
            chosen = random.Random(0).sample(range(count), min(count, ROWS_IN_SAMPLE))
            rows = (data[position] for position in sorted(chosen))
        return [_entries(row) for row in rows]


def _number_of_rows(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _entries(row: Any) -> dict[str, bytes]:
    entries = row if isinstance(row, Mapping) else {"": row}
    return {str(name): _digest_of_value(value) for name, value in entries.items()}


def _digest_of_value(value: Any) -> bytes:
    """Hashes the content of a value; a value of unknown type counts by its type."""
    digest = hashlib.sha256(type(value).__name__.encode())
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        value = np.ascontiguousarray(value)
        digest.update(f"{value.dtype} {value.shape}".encode())
        digest.update(value.tobytes())
    elif isinstance(value, Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(_bytes(value))
    elif isinstance(value, Mapping):
        for name in sorted(value, key=str):
            digest.update(str(name).encode() + _digest_of_value(value[name]))
    elif isinstance(value, (list, tuple, np.ndarray)):
        for part in value:
            digest.update(_digest_of_value(part))
    elif isinstance(value, bytes):
        digest.update(value)
    elif hasattr(value, "tobytes") and hasattr(value, "mode") and hasattr(value, "size"):  # a PIL image
        digest.update(f"{value.mode} {value.size}".encode())
        digest.update(value.tobytes())
    elif value is None or isinstance(value, (str, int, float, complex, np.generic)):
        digest.update(repr(value).encode())
    return digest.digest()


@contextmanager
def _same_random_numbers() -> Iterator[None]:
    """Seeds Python, NumPy and PyTorch inside, and restores their states on leaving."""
    states = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            random.seed(0)
            np.random.seed(0)
            torch.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
