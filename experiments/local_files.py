"""Data sets in plain files of one folder.

vision/NAME.jpg           a sheet of 32 x 32 images, 100 a row, read row by row; a large set has NAME_0.jpg, NAME_1.jpg, ...
vision/NAME_labels.npy    its class indices, where it has any
text/NAME.jsonl.gz        one {"text": ..., "label": ...} a line; the label only where it has any
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .rows import PrepareImages, TensorRows, without_common_padding


SIDE = 32


def read_images(folder: Path, name: str, prepare: PrepareImages, count: int | None = None) -> TensorRows:
    """uint8 images (rows, 3, 32, 32), with labels where there are any; `count` leaves out the empty end of the last sheet."""
    import numpy as np

    sheets = sorted((folder / "vision").glob(f"{name}_[0-9].jpg")) or [folder / "vision" / f"{name}.jpg"]
    if not sheets[0].is_file():
        raise FileNotFoundError(f"{sheets[0]} does not exist: pass the folder with vision/ and text/ as --data")
    images = torch.cat([_tiles(sheet) for sheet in sheets])
    labels = folder / "vision" / f"{name}_labels.npy"
    if not labels.exists():
        return TensorRows({"pixel_values": images[:count]}, prepare)
    classes = torch.from_numpy(np.load(labels, allow_pickle=False).astype("int64"))
    return TensorRows({"pixel_values": images[: len(classes)], "labels": classes}, prepare)


def _tiles(sheet: Path) -> Tensor:
    import numpy as np
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # a sheet is large on purpose
    with Image.open(sheet) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    height, width, _ = pixels.shape
    tiles = pixels.view(height // SIDE, SIDE, width // SIDE, SIDE, 3)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, 3, SIDE, SIDE).contiguous()


def read_texts(folder: Path, name: str, tokenizer: Any, max_length: int = 128) -> TensorRows:
    """Token ids (rows, max_length), with labels where there are any."""
    path = folder / "text" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass the folder with vision/ and text/ as --data")
    with gzip.open(path, "rt", encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    return tokenized([row["text"] for row in rows], [row.get("label") for row in rows], tokenizer, max_length)


def tokenized(texts: list[str], labels: list[int | None], tokenizer: Any, max_length: int) -> TensorRows:
    tokens = tokenizer(texts, max_length=max_length, truncation=True, padding="max_length", return_tensors="pt")
    tensors = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    if all(label is not None for label in labels):
        tensors["labels"] = torch.tensor(labels)
    return TensorRows(tensors, without_common_padding)
