"""Files that are either there whole or not at all."""

import os
from pathlib import Path


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
