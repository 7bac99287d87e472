"""Image corruptions on tensors, on their device.

Each takes images (rows, channels, height, width) in [0, 1], a strength, and a key per row
(`row_keys`), and returns images of the same shape, which the caller clamps to [0, 1]. Lengths are
shares of the shorter side, so that small and large images are corrupted alike. Sums run pixel by
pixel, so that a row's result does not depend on its batch.
"""

import hashlib
import io
import math
from collections import defaultdict
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample, pad


DIRECTIONS = 8  # of motion blur, over half a turn
GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed integer


def gaussian_noise(images: Tensor, strength: float, keys: Tensor) -> Tensor:
    """Add normal noise of this standard deviation."""
    return images + strength * normal(keys, *images.shape[1:])


def shot_noise(images: Tensor, photons: float, keys: Tensor) -> Tensor:
    """Draw Poisson counts with the values times `photons` as means; values are of 256 levels."""
    # The distribution of the count for each level, (256, counts), on the CPU so that it is the same
    # for every device.
    most = math.ceil(photons + 8 * math.sqrt(photons) + 8)  # no level gets as many, in practice
    means = torch.arange(256, device="cpu", dtype=torch.float64).unsqueeze(1) / 255 * photons
    counts = torch.arange(most, device="cpu", dtype=torch.float64)
    log_shares = torch.special.xlogy(counts, means) - means - torch.lgamma(counts + 1)
    cumulative = log_shares.exp().cumsum(dim=1).clamp(max=1)

    # One sorted list for all levels: level n has its cumulative distribution between n and n + 1.
    limits = cumulative + torch.arange(256, device="cpu").unsqueeze(1)
    limits = limits.flatten().to(images.device)
    levels = (images * 255).round().long()
    drawn = levels.double() + uniform(keys, *images.shape[1:]).double()
    numbers = torch.searchsorted(limits, drawn) - levels * most
    return numbers.clamp(max=most).float() / photons


def impulse_noise(images: Tensor, share: float, keys: Tensor) -> Tensor:
    """Make a share of the values black or white."""
    shape = images.shape[1:]
    black_or_white = (uniform(keys, *shape, stream=1) < 0.5).float()
    is_hit = uniform(keys, *shape) < share
    return torch.where(is_hit, black_or_white, images)


def defocus_blur(images: Tensor, share: float, keys: Tensor) -> Tensor:
    """Turn every point into a disk with a soft edge, one pixel wide."""
    radius = share * min(images.shape[2:])
    reach = math.ceil(radius)
    weights = {}
    for y in range(-reach, reach + 1):
        for x in range(-reach, reach + 1):
            weight = min(1.0, radius + 1 - math.hypot(y, x))
            if weight > 0:
                weights[y, x] = weight
    return _weighted(images, weights)


def motion_blur(images: Tensor, share: float, keys: Tensor) -> Tensor:
    """Turn every point into a line, in one of eight directions for each image."""
    length = share * min(images.shape[2:])
    directions = (uniform(keys, 1)[:, 0] * DIRECTIONS).long()
    blurred = images.clone()
    for direction in directions.unique().tolist():
        rows = directions == direction
        line = _line(length, math.pi * direction / DIRECTIONS)
        blurred[rows] = _weighted(images[rows], line)
    return blurred


def zoom_blur(images: Tensor, zoom: float, keys: Tensor) -> Tensor:
    """Average views of the middle, enlarged up to 1 + `zoom` times."""
    steps = 2 + math.ceil(zoom * max(images.shape[2:]) / 2)  # the border moves a pixel at a time
    total = images
    for step in range(1, steps):
        scale = 1 / (1 + zoom * step / (steps - 1))
        view = torch.tensor([[scale, 0, 0], [0, scale, 0]], device=images.device)
        grid = affine_grid(view.expand(len(images), 2, 3), list(images.shape), align_corners=False)
        enlarged = grid_sample(images, grid, padding_mode="border", align_corners=False)
        total = total + enlarged
    return total / steps


def brightness(images: Tensor, amount: float, keys: Tensor) -> Tensor:
    """Raise the largest channel by `amount`, to 1 at most, and the others in proportion.

    Hue and saturation stay.
    """
    value = images.amax(dim=1, keepdim=True)
    raised = (value + amount).clamp(max=1)
    factor = raised / value.clamp(min=1e-6)
    return torch.where(value > 0, images * factor, raised)


def contrast(images: Tensor, share: float, keys: Tensor) -> Tensor:
    """Scale the distance to each channel's mean by `share`."""
    mean = images.flatten(2).mean(dim=2)[..., None, None]
    return mean + share * (images - mean)


def pixelate(images: Tensor, share: float, keys: Tensor) -> Tensor:
    """Replace rectangles by their mean colour.

    A side has `share` times as many rectangles as pixels.
    """
    for dim in (2, 3):
        # The edges of the rectangles along this side.
        side = images.shape[dim]
        count = max(1, round(share * side))
        edges = torch.tensor([side * block // count for block in range(count + 1)], device=images.device)
        widths = edges.diff()

        # Their means are differences of cumulative sums; the side is the last axis meanwhile.
        sums = pad(images.transpose(dim, 3).cumsum(dim=3), (1, 0))
        means = sums.index_select(3, edges).diff(dim=3) / widths
        images = means.repeat_interleave(widths, dim=3).transpose(dim, 3)
    return images


def jpeg_compression(images: Tensor, quality: float, keys: Tensor) -> Tensor:
    """Write images as JPEG files of this quality, and read them, with Pillow."""
    from PIL import Image

    levels = (images * 255).round().byte()
    levels = levels.permute(0, 2, 3, 1).cpu().numpy()  # (rows, height, width, channels)
    decoded = np.empty_like(levels)
    for row, pixels in enumerate(levels):
        is_grey = pixels.shape[2] == 1
        picture = Image.fromarray(pixels[..., 0] if is_grey else pixels)
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=int(quality))
        decoded[row] = np.asarray(Image.open(file)).reshape(pixels.shape)
    decoded = torch.from_numpy(decoded).to(images.device)
    return decoded.permute(0, 3, 1, 2).float() / 255


def _weighted(images: Tensor, weights: Mapping[tuple[int, int], float]) -> Tensor:
    """Return the weighted mean of shifted images; the border is repeated outwards.

    weights: {(down, right): weight}
    """
    reach = max(max(abs(down), abs(right)) for down, right in weights)
    padded = pad(images, (reach,) * 4, mode="replicate")
    height, width = images.shape[2:]
    total = torch.zeros_like(images)
    whole = math.fsum(weights.values())
    for (down, right), weight in weights.items():
        top = reach + down
        left = reach + right
        shifted = padded[..., top : top + height, left : left + width]
        total = total + shifted * (weight / whole)
    return total


def _line(length: float, angle: float) -> dict[tuple[int, int], float]:
    """Return the weights of a line through the middle, {(down, right): weight}.

    Each of its points is split between the four pixels around it.
    """
    points = 2 * math.ceil(4 * length) + 1
    weights: dict[tuple[int, int], float] = defaultdict(float)
    for point in range(points):
        offset = length * (point / (points - 1) - 0.5)
        y = offset * math.sin(angle)
        x = offset * math.cos(angle)
        top = math.floor(y)
        left = math.floor(x)
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            weight = (1 - abs(y - top - down)) * (1 - abs(x - left - right))
            if weight > 1e-6:
                weights[top + down, left + right] += weight
    return dict(weights)


# Random numbers that depend on an image's content and a seed, but not on its batch or device:
# 64-bit integers are mixed by shifts and products (splitmix64), which are exact on every device.


def key_of(*parts: object) -> int:
    """Return a signed 64-bit hash of texts and numbers."""
    text = "\0".join(map(str, parts))
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def row_keys(images: Tensor, *parts: object) -> Tensor:
    """Return a key per image, from its 8-bit levels.

    images (rows, channels, height, width) in [0, 1] -> (rows,) int64
    """
    levels = (images * 255).round().long().flatten(1)
    factors = _mixed(_counter(levels.shape[1], images.device))
    content = (levels * factors).sum(dim=1)
    return _mixed(content ^ key_of(*parts))


def uniform(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Return numbers above 0 and below 1, (rows, *shape); each `stream` has its own."""
    starts = _mixed(keys + stream * GOLDEN).unsqueeze(1)  # (rows, 1)
    numbers = starts + _counter(math.prod(shape), keys.device)
    # 23 bits plus one half: each value, and its distance to 0.5, is exact in float32
    bits = _shifted(_mixed(numbers), 41)
    values = (bits.float() + 0.5) / 2**23
    return values.view(len(keys), *shape)


def normal(keys: Tensor, *shape: int) -> Tensor:
    """Return standard normal numbers, (rows, *shape)."""
    between_minus_1_and_1 = 2 * uniform(keys, *shape) - 1
    return math.sqrt(2) * torch.erfinv(between_minus_1_and_1)


def _counter(count: int, device: torch.device) -> Tensor:
    """Return the first `count` states of splitmix64's counter."""
    return torch.arange(1, count + 1, device=device) * GOLDEN


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shift right and fill with zeros; torch's own shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(numbers: Tensor) -> Tensor:
    """Mix the bits of each number, by splitmix64's finalizer; its factors as signed integers."""
    numbers = (numbers ^ _shifted(numbers, 30)) * -4658895280553007687
    numbers = (numbers ^ _shifted(numbers, 27)) * -7723592293110705685
    return numbers ^ _shifted(numbers, 31)
