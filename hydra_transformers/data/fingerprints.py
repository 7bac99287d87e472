"""Hashes of weights, configs and data, which identify a run when it is resumed."""

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
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedConfig


ROWS_IN_SAMPLE = 64


def fingerprint_of_weights(model: nn.Module) -> str:
    """Equal for two models exactly if they have the same parameters, bit for bit."""
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        digest.update(f"{name} {parameter.dtype} {tuple(parameter.shape)}".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()


# Fields that change no answer, and `kept_heads`, which a run records by itself.
IGNORED_FIELDS = ("_name_or_path", "architectures", "auto_map", "dtype", "fast_inference", "id2label", "label2id")
IGNORED_FIELDS += ("kept_heads", "torch_dtype", "transformers_version")


def fingerprint_of_config(config: PreTrainedConfig) -> str:
    """Equal for two configs with which equal weights compute the same: activations, epsilons, positions, windows."""

    def without_ignored(fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {str(name): without_ignored(value) for name, value in fields.items() if name not in IGNORED_FIELDS}

    fields = json.dumps(without_ignored(config.to_dict()), sort_keys=True, default=str)
    return hashlib.sha256(fields.encode()).hexdigest()


def fingerprints_of_rows(batch: Mapping[str, Tensor]) -> list[bytes]:
    """One digest per row, so that another batch size gives the same ones."""
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
    """How many rows `data` has (None where it does not say) and a digest of a sample of them.

    data: what `Trainer` takes, rows that can be indexed or iterated over; for several sets by name, a dict of them
    in_worker: read the rows in another process, as a `DataLoader` with workers does. A set that opens its file with the
        first row must not do so here: its workers would share the open file

    The rows of the sample are the same in every process, for the same number of rows. Each is read twice, with the same
    random numbers, so that what is drawn for it (a crop, a flip) is drawn alike; an entry that still comes out differently
    counts by its name alone.
    """
    if isinstance(data, Mapping):
        return {str(name): fingerprint_of_data(part, in_worker) for name, part in data.items()}
    sample = _Sample(data)
    # With workers, one reads the whole sample, and its digests come back.
    generator = torch.Generator()  # a DataLoader would otherwise draw from everybody's
    loader = DataLoader(sample, batch_size=None, collate_fn=_as_it_is, num_workers=int(in_worker), generator=generator)
    [digest] = list(loader)
    return {"rows": sample.rows, "sample": digest}


class _Sample(Dataset):
    """One item: the digest of a sample of the rows."""

    def __init__(self, data: Any):
        self.data = data
        self.rows = _number_of_rows(data)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> str:
        digest = hashlib.sha256()
        for first, second in zip_longest(self._read(), self._read(), fillvalue={}):
            digest.update(f"row of {len(first)}".encode())
            for name in sorted(first):
                digest.update(name.encode())
                digest.update(first[name] if first[name] == second.get(name) else b"changes")
        return digest.hexdigest()

    def _read(self) -> list[dict[str, bytes]]:
        """Each row's entries as digests."""
        with _same_random_numbers():
            if isinstance(self.data, Iterator):
                rows = ()  # they could be read once only
            elif self.rows is None or not hasattr(self.data, "__getitem__"):
                rows = islice(iter(self.data), ROWS_IN_SAMPLE)
            else:
                chosen = random.Random(0).sample(range(self.rows), min(self.rows, ROWS_IN_SAMPLE))
                rows = (self.data[position] for position in sorted(chosen))
            return [_entries(row) for row in rows]


def _number_of_rows(data: Any) -> int | None:
    try:
        return len(data)
    except (TypeError, NotImplementedError):
        return None


def _as_it_is(value: Any) -> Any:
    return value


def _entries(row: Any) -> dict[str, bytes]:
    entries = row if isinstance(row, Mapping) else {"": row}
    return {str(name): _digest_of_value(value) for name, value in entries.items()}


def _digest_of_value(value: Any) -> bytes:
    """Hashes what a value holds; a value of an unknown kind counts by its type."""
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
