"""The demo's data, all of it inside scikit-learn: handwritten digits, and patches of two photos.

Known are the digits 0 to 6. The unknown that is chosen by (the digit 7, patches of one photo: whether to fuse, which heads to
prune) is never judged on; what is judged on (the digits 8 and 9, patches of the other photo) is never seen before.
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
PATCH_PIXELS = 32  # of the photo, which become the 8 pixels of a digit


@dataclass(frozen=True)
class Images:
    """Grey images (rows, 8, 8) of whole numbers from 0 to 255, and labels (rows,) where they have classes."""

    pixels: np.ndarray
    labels: Tensor | None = None

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def pixel_values(self) -> Tensor:
        """(rows, 3, 8, 8) between -1 and 1, as the saved image processor makes them: pipelines open every image as RGB."""
        grey = torch.from_numpy(self.pixels).float() / 255 * 2 - 1
        return grey.unsqueeze(1).expand(-1, 3, -1, -1)

    def spread(self, count: int) -> "Images":
        """`count` of the images, taken evenly from all of them."""
        rows = np.linspace(0, len(self) - 1, min(count, len(self))).round().astype(int)
        return Images(self.pixels[rows], None if self.labels is None else self.labels[torch.from_numpy(rows)])

    @staticmethod
    def together(several: Iterable["Images"]) -> "Images":
        """All images one after the other, without labels."""
        return Images(np.concatenate([images.pixels for images in several]))

    def batches(self, size: int = 64) -> list[dict[str, Tensor]]:
        columns = {"pixel_values": self.pixel_values.split(size)}
        if self.labels is not None:
            columns["labels"] = self.labels.split(size)
        return [dict(zip(columns, parts, strict=True)) for parts in zip(*columns.values(), strict=True)]

    def rows(self) -> list[dict]:
        """What a Trainer takes."""
        return [
            {"pixel_values": image, "labels": int(label)}
            for image, label in zip(self.pixel_values, self.labels, strict=True)
        ]


@dataclass(frozen=True)
class DemoData:
    """train, validation, calibration, test: known digits; choosing: unlike them, near and far, to choose by; near, far: unlike
    them, for judging."""

    train: Images
    validation: Images
    calibration: Images
    test: Images
    choosing: dict[str, dict[str, Images]]
    near: dict[str, Images]
    far: dict[str, Images]


def load_data() -> DemoData:
    levels, digits = _digits()
    known = np.flatnonzero(np.isin(digits, KNOWN_DIGITS))
    order = known[torch.randperm(len(known), generator=torch.Generator().manual_seed(0)).numpy()]
    train, validation, calibration, test = np.split(order, np.cumsum([TRAIN_ROWS, VALIDATION_ROWS, CALIBRATION_ROWS]))

    def known_digits(rows: np.ndarray) -> Images:
        return Images(levels[rows], torch.from_numpy(digits[rows]).long())

    return DemoData(
        train=known_digits(train),
        validation=known_digits(validation),
        calibration=known_digits(calibration),
        test=known_digits(test),
        choosing={
            "near": {f"digit {CHOOSING_DIGIT}": Images(levels[digits == CHOOSING_DIGIT][:100])},
            "far": {"photo patches": Images(photo_patches(CHOOSING_PHOTO)[::2][:100])},
        },
        near={f"digit {digit}": Images(levels[digits == digit]) for digit in JUDGED_DIGITS},
        far={"photo patches": Images(photo_patches(JUDGED_PHOTO))},
    )


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Images (rows, 8, 8) and the digits they show (rows,)."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the demo needs scikit-learn for its digits: pip install scikit-learn") from error
    levels, digits = load_digits(return_X_y=True)
    # The digits have levels from 0 to 16.
    return np.round(levels.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8), digits


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
