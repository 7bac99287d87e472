"""Random numbers that depend on an image's content and a seed, but not on its batch or device.

64-bit integers are mixed by shifts and products (splitmix64), which are exact on every device.
"""

import hashlib
import math

import torch
from torch import Tensor


GOLDEN = -7046029254386353131  # 2^64 divided by the golden ratio, as a signed integer


def key_of(*parts: object) -> int:
    """A signed 64-bit hash of texts and numbers."""
    digest = hashlib.blake2b("\0".join(map(str, parts)).encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big", signed=True)


def row_keys(images: Tensor, *parts: object) -> Tensor:
    """A key per image from its 8-bit levels: images (rows, channels, height, width) in [0, 1] -> (rows,) int64"""
    levels = (images * 255).round().long().flatten(1)
    content = (levels * _mixed(_counter(levels.shape[1], images.device))).sum(dim=1)
    return _mixed(content ^ key_of(*parts))


def uniform(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Numbers above 0 and below 1, (rows, *shape); each `stream` has its own."""
    numbers = _mixed(keys + stream * GOLDEN).unsqueeze(1) + _counter(math.prod(shape), keys.device)
    # 23 bits plus one half: each value, and its distance to 0.5, is exact in float32
    return ((_shifted(_mixed(numbers), 41).float() + 0.5) / 2**23).view(len(keys), *shape)


def normal(keys: Tensor, *shape: int, stream: int = 0) -> Tensor:
    """Standard normal numbers, (rows, *shape)."""
    return math.sqrt(2) * torch.erfinv(2 * uniform(keys, *shape, stream=stream) - 1)


def _counter(count: int, device: torch.device) -> Tensor:
    return torch.arange(1, count + 1, device=device) * GOLDEN


def _shifted(numbers: Tensor, bits: int) -> Tensor:
    """Shifts right and fills with zeros; torch's own shift repeats the sign."""
    return (numbers >> bits) & ((1 << (64 - bits)) - 1)


def _mixed(numbers: Tensor) -> Tensor:
    numbers = (numbers ^ _shifted(numbers, 30)) * -4658895280553007687
    numbers = (numbers ^ _shifted(numbers, 27)) * -7723592293110705685
    return numbers ^ _shifted(numbers, 31)
