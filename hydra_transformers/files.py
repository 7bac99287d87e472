"""Files and folders that are either there whole or not at all."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def write_atomically(path: str | os.PathLike, content: str | bytes) -> Path:
    """Write `content` beside `path` first, then put it in place; missing folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def parse_json(content: bytes) -> Any:
    """What a JSON file holds; a ValueError whatever is wrong with it (no text, no JSON, nested too deep)."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


@contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A folder to write into, which takes the place of `folder` once everything in it is written."""
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed and had this one's number
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(unfinished, folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
