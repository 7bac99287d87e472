"""Files of fitted parts beside a model: found in a folder or on the Hub, written whole, checked when read."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save as format_tensors
from torch import Tensor
from transformers.utils import cached_file

from .._io.files import parse_json, write_atomically


def find_saved(folder: str | os.PathLike, name: str) -> Path | None:
    """The file of this name in a folder, or in a repository of the Hub; None where there is none."""
    if Path(folder).is_dir():
        return Path(folder) / name if (Path(folder) / name).is_file() else None
    found = cached_file(str(folder), name, _raise_exceptions_for_missing_entries=False)
    return None if found is None else Path(found)


def saved_in(folder: str | os.PathLike, name: str, owner: str) -> Path:
    """`find_saved`, or an error that names the class whose `save` writes the file."""
    path = find_saved(folder, name)
    if path is None:
        raise FileNotFoundError(f"{folder} has no {name}: save a {owner} there first")
    return path


def save_tensors(path: Path, tensors: Mapping[str, Tensor], key: str, settings: Mapping[str, Any]) -> Path:
    """Writes tensors as safetensors, with settings as JSON under `key` in the metadata."""
    tensors = {name: tensor.contiguous().cpu() for name, tensor in tensors.items()}
    return write_atomically(path, format_tensors(tensors, metadata={"format": "pt", key: json.dumps(settings)}))


def load_tensors(path: Path, key: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Reads what `save_tensors` wrote; a ValueError otherwise."""
    try:
        with safe_open(path, "pt") as opened:
            settings = dict(parse_json((opened.metadata() or {})[key].encode()))
            return {name: opened.get_tensor(name) for name in opened.keys()}, settings  # noqa: SIM118
    except (SafetensorError, ValueError, TypeError, KeyError, OSError) as error:
        raise ValueError(str(error)) from error
