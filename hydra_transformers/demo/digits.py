"""The demo's data, all of it from scikit-learn: handwritten digits, and patches of two photos.

The digits 0 to 6 are known. Of the unknown, the digit 7 and one photo serve to choose (whether to fuse, which heads to
prune); the digits 8 and 9 and the other photo only test.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


KNOWN_DIGITS = range(7)
CHOOSING_DIGIT, JUDGED_DIGITS = 7, (8, 9)
CHOOSING_PHOTO, JUDGED_PHOTO = "china.jpg", "flower.jpg"
TRAIN_ROWS, VALIDATION_ROWS, CALIBRATION_ROWS = 650, 250, 164
PATCH_PIXELS = 32  # of the photo, for the 8 pixels of a digit


@dataclass(frozen=True)
class Images:
    """Grey images (rows, 8, 8) of whole numbers from 0 to 255, and labels (rows,) if they have classes."""

    pixels: np.ndarray
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def pixel_values(self) -> Tensor:
        """(rows, 3, 8, 8) between -1 and 1, as the saved image processor makes them."""
        grey = torch.from_numpy(self.pixels).float() / 255 * 2 - 1
        return grey.unsqueeze(1).expand(-1, 3, -1, -1)

    def spread(self, count: int) -> "Images":
        """`count` of the images, at even distances."""
        rows = np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(int)
        return Images(self.pixels[rows], None if self.labels is None else self.labels[torch.from_numpy(rows)])

    @staticmethod
    def together(several: Iterable["Images"]) -> "Images":
        """All images, without labels."""
        return Images(np.concatenate([images.pixels for images in several]))

    def batches(self, size: int = 64) -> list[dict[str, Tensor]]:
        columns = {"pixel_values": self.pixel_values.split(size)}
        if self.labels is not None:
            columns["labels"] = self.labels.split(size)
        return [dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)]

    def rows(self) -> list[dict]:
        """As Trainer takes them."""
        pairs = zip(self.pixel_values, self.labels.tolist(), strict=True)
        return [{"pixel_values": image, "labels": label} for image, label in pairs]


@dataclass(frozen=True)
class DemoData:
    """train, validation, calibration, test: known digits; choosing: unknown images, near and far, to choose by; near, far:
    unknown images that only test"""

    train: Images
    validation: Images
    calibration: Images
    test: Images
    choosing: dict[str, dict[str, Images]]
    near: dict[str, Images]
    far: dict[str, Images]


def load_data() -> DemoData:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the demo needs scikit-learn for its digits: pip install scikit-learn") from error
    levels, digits = load_digits(return_X_y=True)  # levels from 0 to 16
    levels = np.round(levels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    known = np.flatnonzero(np.isin(digits, KNOWN_DIGITS))
    order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0)).numpy()]
    parts = np.split(order, np.cumsum([TRAIN_ROWS, VALIDATION_ROWS, CALIBRATION_ROWS]))
    return DemoData(
        *(Images(levels[rows], torch.from_numpy(digits[rows]).long()) for rows in parts),
        choosing={
            "near": {f"digit {CHOOSING_DIGIT}": Images(levels[digits == CHOOSING_DIGIT][:100])},
            "far": {"photo patches": Images(photo_patches(CHOOSING_PHOTO)[::2][:100])},
        },
        near={f"digit {digit}": Images(levels[digits == digit]) for digit in JUDGED_DIGITS},
        far={"photo patches": Images(photo_patches(JUDGED_PHOTO))},
    )


def photo_patches(name: str) -> np.ndarray:
    """Patches of a photo side by side, grey and as small as a digit: (rows, 8, 8)."""
    from sklearn.datasets import load_sample_image

    try:
        grey = load_sample_image(name).mean(axis=-1)
    except ImportError as error:
        raise ImportError("the demo needs Pillow to open its photos: pip install pillow") from error
    rows, columns = grey.shape[0] // PATCH_PIXELS, grey.shape[1] // PATCH_PIXELS
    block = PATCH_PIXELS // 8
    blocks = grey[: rows * PATCH_PIXELS, : columns * PATCH_PIXELS].reshape(rows, 8, block, columns, 8, block)
    patches = blocks.mean(axis=(2, 5)).transpose(0, 2, 1, 3).reshape(-1, 8, 8)
    return np.round(patches).astype(np.uint8)
