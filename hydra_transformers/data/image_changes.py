"""Random changes to training images: crops, flips, and RandAugment."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from PIL.Image import Image

FLIPPED = 0.5  # of the images
ATTEMPTS = 10  # to draw a rectangle that fits, as torchvision's RandomResizedCrop
STRENGTHS = 31  # of RandAugment, from 0 to 30


@dataclass(frozen=True)
class CropAndFlip:
    """Cuts a rectangle out of an image and mirrors half of the images, each time anew.

    The processor resizes the rectangle. Together they are the usual random resized crop with a
    horizontal flip.

    Args:
        least_share (`float`, defaults to 0.7): the smallest part of an image's area that is kept;
            ImageNet's usual one is 0.08.
    """

    least_share: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.least_share <= 1:
            raise ValueError(f"least_share is {self.least_share}: pass a part of the area, above 0 and at most 1")

    def __call__(self, image: "Image") -> "Image":
        from PIL import ImageOps

        image = image.crop(self._box(*image.size))
        if torch.rand(()).item() < FLIPPED:
            return ImageOps.mirror(image)
        return image

    def _box(self, width: int, height: int) -> tuple[int, int, int, int]:
        """Return the left, upper, right and lower edge of a rectangle, drawn at random."""
        for _ in range(ATTEMPTS):
            share, shape, right, down = torch.rand(4).tolist()
            area = width * height * (self.least_share + share * (1.0 - self.least_share))
            ratio = (3 / 4) ** (1 - 2 * shape)
            wide = round(math.sqrt(area * ratio))
            high = round(math.sqrt(area / ratio))
            # A tall one may not fit into a wide image.
            if 0 < wide <= width and 0 < high <= height:
                left = int(right * (width - wide + 1))
                top = int(down * (height - high + 1))
                return left, top, left + wide, top + high
        return 0, 0, width, height


@dataclass(frozen=True)
class RandAugment:
    """Changes an image by some of fourteen operations, drawn at random (Cubuk et al., 2020).

    They and their strengths are those of torchvision's `RandAugment`; what a shift, a turn or a
    shear leaves open is black.

    Args:
        operations (`int`, defaults to 2): how many, one after the other.
        magnitude (`int`, defaults to 12): how strong, from 0 to 30.
    """

    operations: int = 2
    magnitude: int = 12

    def __post_init__(self) -> None:
        if self.operations < 0 or not 0 <= self.magnitude < STRENGTHS:
            raise ValueError(
                f"operations is {self.operations} and magnitude {self.magnitude}: pass operations of 0 or more, and a "
                f"magnitude from 0 to {STRENGTHS - 1}"
            )

    def __call__(self, image: "Image") -> "Image":
        for _ in range(self.operations):
            place = int(torch.randint(len(OPERATIONS), ()))
            is_negative = torch.rand(()).item() < 0.5
            strength = self.magnitude / (STRENGTHS - 1)
            if is_negative:
                strength = -strength
            image = OPERATIONS[place](image, strength)
        return image


@dataclass(frozen=True)
class InTurn:
    """Changes an image by several changes, one after the other."""

    changes: Sequence[Callable[["Image"], "Image"]]

    def __call__(self, image: "Image") -> "Image":
        for change in self.changes:
            image = change(image)
        return image


# The operations of RandAugment: of an image and a strength from -1 to 1. Where only one direction
# makes sense, the sign does not count.


def _identity(image: "Image", strength: float) -> "Image":
    return image


def _affine(image: "Image", matrix: tuple[float, ...]) -> "Image":
    """Return an image whose pixel (x, y) is that at (a x + b y + c, d x + e y + f).

    matrix: (a, b, c, d, e, f)
    """
    from PIL import Image

    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.NEAREST)


def _shear_x(image: "Image", strength: float) -> "Image":
    return _affine(image, (1, 0.3 * strength, 0, 0, 1, 0))


def _shear_y(image: "Image", strength: float) -> "Image":
    return _affine(image, (1, 0, 0, 0.3 * strength, 1, 0))


def _shift_x(image: "Image", strength: float) -> "Image":
    return _affine(image, (1, 0, int(150 / 331 * image.width * strength), 0, 1, 0))


def _shift_y(image: "Image", strength: float) -> "Image":
    return _affine(image, (1, 0, 0, 0, 1, int(150 / 331 * image.height * strength)))


def _rotate(image: "Image", strength: float) -> "Image":
    from PIL import Image

    return image.rotate(30 * strength, Image.Resampling.NEAREST)


def _brightness(image: "Image", strength: float) -> "Image":
    from PIL import ImageEnhance

    return ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength)


def _colour(image: "Image", strength: float) -> "Image":
    from PIL import ImageEnhance

    return ImageEnhance.Color(image).enhance(1 + 0.9 * strength)


def _contrast(image: "Image", strength: float) -> "Image":
    from PIL import ImageEnhance

    return ImageEnhance.Contrast(image).enhance(1 + 0.9 * strength)


def _sharpness(image: "Image", strength: float) -> "Image":
    from PIL import ImageEnhance

    return ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength)


def _posterize(image: "Image", strength: float) -> "Image":
    from PIL import ImageOps

    return ImageOps.posterize(image, 8 - round(4 * abs(strength)))


def _solarize(image: "Image", strength: float) -> "Image":
    from PIL import ImageOps

    return ImageOps.solarize(image, 255 * (1 - abs(strength)))


def _autocontrast(image: "Image", strength: float) -> "Image":
    from PIL import ImageOps

    return ImageOps.autocontrast(image)


def _equalize(image: "Image", strength: float) -> "Image":
    from PIL import ImageOps

    return ImageOps.equalize(image)


OPERATIONS: tuple[Callable[["Image", float], "Image"], ...] = (
    *(_identity, _shear_x, _shear_y, _shift_x, _shift_y, _rotate, _brightness, _colour, _contrast, _sharpness),
    *(_posterize, _solarize, _autocontrast, _equalize),
)
