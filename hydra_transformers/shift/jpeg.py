"""JPEG compression in torch: colours at half size, 8 x 8 blocks transformed, rounded to the quality's steps, and back.

It runs on the images' device. Most pixels equal those of a file that Pillow writes with the same quality; the others differ
because its integer arithmetic rounds some coefficients to another step.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, interpolate, pad


# The steps at quality 50 (annex K of the standard), rows from low to high vertical frequency.
LUMINANCE = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
CHROMINANCE = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *(((99,) * 8,) * 4),
)


def jpeg_compression(images: Tensor, quality: float, keys: Tensor | None = None) -> Tensor:
    """Images (rows, 1 or 3, height, width) in [0, 1] as a JPEG file of that quality would return them; `keys` are not used."""
    levels = (images * 255).round()
    if images.shape[1] == 1:
        return _coded(levels, LUMINANCE, quality) / 255
    red, green, blue = levels.split(1, dim=1)
    luma = (0.299 * red + 0.587 * green + 0.114 * blue).round()
    colours = torch.cat(
        [-0.168736 * red - 0.331264 * green + 0.5 * blue + 128, 0.5 * red - 0.418688 * green - 0.081312 * blue + 128],
        dim=1,
    ).round()
    luma = _coded(luma, LUMINANCE, quality)
    height, width = images.shape[2:]
    halved = _coded(avg_pool2d(_filled_up(colours, 2), 2).round(), CHROMINANCE, quality)
    colours = interpolate(halved, scale_factor=2, mode="bilinear").round()[..., :height, :width]
    blueness, redness = (colours - 128).split(1, dim=1)
    rgb = torch.cat(
        [luma + 1.402 * redness, luma - 0.344136 * blueness - 0.714136 * redness, luma + 1.772 * blueness], dim=1
    )
    return rgb.round().clamp(0, 255) / 255


def _coded(planes: Tensor, table: tuple[tuple[int, ...], ...], quality: float) -> Tensor:
    """Transforms planes (rows, planes, height, width) of levels from 0 to 255, rounds the coefficients, and transforms back."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    steps = [[min(max((step * scale + 50) // 100, 1), 255) for step in row] for row in table]
    steps = torch.tensor(steps, dtype=planes.dtype, device=planes.device)
    rows, count, height, width = planes.shape
    filled = _filled_up(planes, 8) - 128
    down, across = filled.shape[2] // 8, filled.shape[3] // 8
    blocks = filled.view(rows, count, down, 8, across, 8).transpose(3, 4)  # (..., down, across, 8, 8)
    cosines = _cosines(planes.device)
    coefficients = _transformed(_transformed(blocks, cosines).mT, cosines).mT
    coefficients = coefficients.sign() * (coefficients.abs() / steps + 0.5).floor() * steps  # halves away from zero
    blocks = _transformed(_transformed(coefficients, cosines.T).mT, cosines.T).mT
    decoded = blocks.transpose(3, 4).reshape(filled.shape) + 128
    return decoded.round().clamp(0, 255)[..., :height, :width]


def _filled_up(planes: Tensor, multiple: int) -> Tensor:
    """Repeats the last row and column up to a multiple of pixels per side."""
    height, width = planes.shape[2:]
    return pad(planes, (0, -width % multiple, 0, -height % multiple), mode="replicate")


def _cosines(device: torch.device) -> Tensor:
    """The orthonormal discrete cosine transform, (8 frequencies, 8 places)."""
    rows = [
        [math.sqrt((1 if k == 0 else 2) / 8) * math.cos((2 * n + 1) * k * math.pi / 16) for n in range(8)]
        for k in range(8)
    ]
    return torch.tensor(rows, device=device)


def _transformed(values: Tensor, matrix: Tensor) -> Tensor:
    """The matrix times the last dimension, as eight sums: the rounding of a matrix product may depend on the batch size."""
    total = values[..., :1] * matrix[:, 0]
    for place in range(1, 8):
        total = total + values[..., place : place + 1] * matrix[:, place]
    return total
