"""Data sets in plain files of one folder.

vision/NAME.jpg           a sheet of 32 x 32 images, 100 a row, read row by row; a large set has NAME_0.jpg, NAME_1.jpg, ...
vision/NAME_labels.npy    its class indices, where it has any; -1 for an image of another class
vision64/...              the same, of 64 x 64 images
vision64/class_names.json the names of the classes of each set, {"train": ["beacon, lighthouse", ...]}
text/NAME.jsonl.gz        one {"text": ..., "label": ...} a line; the label only where it has any
"""

import gzip
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .rows import PrepareImages, TensorRows, without_common_padding


FOLDERS = {32: "vision", 64: "vision64"}  # by the side of their images, in pixels


def read_images(
    folder: Path, name: str, prepare: PrepareImages, count: int | None = None, side: int = 32
) -> TensorRows:
    """uint8 images (rows, 3, side, side), with labels where there are any; `count` leaves out the empty end of the last
    sheet."""
    import numpy as np

    place = folder / FOLDERS[side]
    sheets = sorted(place.glob(f"{name}_[0-9].jpg")) or [place / f"{name}.jpg"]
    if not sheets[0].is_file():
        raise FileNotFoundError(f"{sheets[0]} does not exist: pass the folder with {place.name}/ as --data")
    images = torch.cat([_tiles(sheet, side) for sheet in sheets])
    labels = place / f"{name}_labels.npy"
    if not labels.exists():
        return TensorRows({"pixel_values": images[:count]}, prepare)
    classes = torch.from_numpy(np.load(labels, allow_pickle=False).astype("int64"))
    tensors = {"pixel_values": images[: len(classes)]} | ({} if (classes < 0).all() else {"labels": classes})
    return TensorRows(tensors, prepare)


def _tiles(sheet: Path, side: int) -> Tensor:
    import numpy as np
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # a sheet is large on purpose
    with Image.open(sheet) as image:
        pixels = torch.from_numpy(np.array(image.convert("RGB")))
    height, width, _ = pixels.shape
    tiles = pixels.view(height // side, side, width // side, side, 3)
    return tiles.permute(0, 2, 4, 1, 3).reshape(-1, 3, side, side).contiguous()


def read_strings(folder: Path, name: str) -> tuple[list[str], list[int | None]]:
    """The texts, and the label of each or None."""
    path = folder / "text" / f"{name}.jsonl.gz"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: pass the folder with text/ as --data")
    with gzip.open(path, "rt", encoding="utf8") as lines:
        rows = [json.loads(line) for line in lines]
    return [row["text"] for row in rows], [row.get("label") for row in rows]


def tokenized(texts: list[str], labels: list[int | None], tokenizer: Any, max_length: int) -> TensorRows:
    tokens = tokenizer(texts, max_length=max_length, truncation=True, padding="max_length", return_tensors="pt")
    tensors = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    if all(label is not None for label in labels):
        tensors["labels"] = torch.tensor(labels)
    return TensorRows(tensors, without_common_padding)
