"""Random crops and flips of training images."""

import math
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class RandomCropAndFlip:
    """A rectangle of an image, mirrored or not, each time another.

    scale: the least and the largest share of the area
    flip: how often it is mirrored
    """

    scale: tuple[float, float]
    flip: float

    def __call__(self, image: Any) -> Any:
        from PIL import ImageOps

        image = image.crop(self._box(*image.size))
        return ImageOps.mirror(image) if torch.rand(()).item() < self.flip else image

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):  # until one fits, as torchvision's RandomResizedCrop
            share, shape, right, down = torch.rand(4).tolist()
            area = width * height * (self.scale[0] + share * (self.scale[1] - self.scale[0]))
            ratio = (3 / 4) ** (1 - 2 * shape)
            wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
            if 0 < wide <= width and 0 < high <= height:
                left, top = int(right * (width - wide + 1)), int(down * (height - high + 1))
                return left, top, left + wide, top + high
        return 0, 0, width, height
