"""Random crops and flips of training images."""

import math
from typing import Any

import torch


LEAST_SHARE, FLIPPED = 0.7, 0.5  # of an image's area, and of the images


def crop_and_flip(image: Any) -> Any:
    """A rectangle of an image, mirrored or not, each time another."""
    from PIL import ImageOps

    image = image.crop(_box(*image.size))
    return ImageOps.mirror(image) if torch.rand(()).item() < FLIPPED else image


def _box(width: int, height: int) -> tuple[int, int, int, int]:
    for _ in range(10):  # until one fits, as torchvision's RandomResizedCrop
        share, shape, right, down = torch.rand(4).tolist()
        area = width * height * (LEAST_SHARE + share * (1.0 - LEAST_SHARE))
        ratio = (3 / 4) ** (1 - 2 * shape)
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            left, top = int(right * (width - wide + 1)), int(down * (height - high + 1))
            return left, top, left + wide, top + high
    return 0, 0, width, height
