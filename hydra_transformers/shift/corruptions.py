"""The corruptions by name, their strengths at five severities, and `corrupt`."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..models.inputs import read_image
from . import image_corruptions as on_images
from . import text_corruptions as on_texts


SEVERITIES = (1, 2, 3, 4, 5)
"""From hardly visible to hardly readable."""
VALUES_AT_A_TIME = 2**24  # of a tensor of images, to limit the memory for random numbers
TOLERANCE = 0.05  # resizing overshoots a little at edges


@dataclass(frozen=True)
class Corruption:
    """A way to corrupt images or texts (`kind`), named as in ImageNet-C where it has it; `CORRUPTIONS` has all of them.

    strengths: one for each severity
    change: the function, see `image_corruptions` and `text_corruptions`
    """

    name: str
    kind: str
    group: str
    strengths: tuple[float, float, float, float, float]
    change: Callable


# Noise, zoom, brightness, contrast, pixelate and JPEG have ImageNet-C's strengths. Its blurs are in pixels of images 224 wide,
# and it also desaturates.
_ROWS = (  # group, strengths, function; what the strengths are
    ("noise", (0.08, 0.12, 0.18, 0.26, 0.38), on_images.gaussian_noise),  # standard deviation of the noise
    ("noise", (60, 25, 12, 5, 3), on_images.shot_noise),  # photons of a white pixel
    ("noise", (0.03, 0.06, 0.09, 0.17, 0.27), on_images.impulse_noise),  # share of values made black or white
    ("blur", (0.012, 0.018, 0.025, 0.033, 0.042), on_images.defocus_blur),  # radius, of the shorter side
    ("blur", (0.04, 0.06, 0.08, 0.1, 0.13), on_images.motion_blur),  # length, of the shorter side
    ("blur", (0.11, 0.16, 0.21, 0.26, 0.31), on_images.zoom_blur),  # zoom beyond 1
    ("colour", (0.1, 0.2, 0.3, 0.4, 0.5), on_images.brightness),  # added to the value (HSV)
    ("colour", (0.4, 0.3, 0.2, 0.1, 0.05), on_images.contrast),  # share that is left
    ("digital", (0.6, 0.5, 0.4, 0.3, 0.25), on_images.pixelate),  # share of the sides
    ("digital", (25, 18, 15, 10, 7), on_images.jpeg_compression),  # quality
    ("characters", (0.02, 0.05, 0.1, 0.15, 0.25), on_texts.typos),  # share of letters mistyped
    ("characters", (0.02, 0.05, 0.1, 0.15, 0.25), on_texts.character_drops),  # share of letters dropped
    ("words", (0.05, 0.1, 0.2, 0.3, 0.5), on_texts.word_drops),  # share of words dropped
)
_KINDS = {on_images.__name__: "image", on_texts.__name__: "text"}
CORRUPTIONS = {
    change.__name__: Corruption(change.__name__, _KINDS[change.__module__], group, strengths, change)
    for group, strengths, change in _ROWS
}
"""All corruptions, by name."""


def corrupt(data: Any, name: str, severity: int, seed: int = 0, *, processor: Any = None) -> Any:
    """Corrupted images or texts; `data` stays as it is.

    Args:
        data (`torch.Tensor`, `PIL.Image.Image`, `str` or `list`): a tensor of images, (rows, channels, height, width) or
            (channels, height, width), with 1 or 3 channels: uint8, floats in [0, 1], or such images scaled by `processor`; a
            PIL image; a text; or a list of texts or PIL images.
        name (`str`): of a corruption, such as "gaussian_noise"; an unknown one raises an error that lists all.
        severity (`int`): 1 to 5.
        seed (`int`, defaults to 0): the result depends on it and on the image or text alone, not on its batch or place; all
            severities use the same random numbers.
        processor (image processor, *optional*): what scaled the images. They are scaled back, corrupted, clamped to [0, 1]
            and scaled again.

    Returns the same type, device and dtype as `data`.
    """
    if isinstance(data, (list, tuple)):
        return [corrupt(value, name, severity, seed, processor=processor) for value in data]
    corruption = corruption_named(name, "text" if isinstance(data, str) else "image", severity)
    strength = corruption.strengths[severity - 1]
    if isinstance(data, str):
        return corruption.change(data, strength, random.Random(on_images.key_of(name, seed, data)))
    if isinstance(data, Tensor):
        return _corrupted_tensor(data, corruption, strength, seed, pixel_scale(processor))
    if hasattr(data, "convert") and hasattr(data, "size"):
        return _corrupted_picture(data, corruption, strength, seed)
    raise TypeError(f"data is a {type(data).__name__}, not images or texts: for data sets use corrupted(data, ...)")


@torch.no_grad()
def _corrupted_tensor(data: Tensor, corruption: Corruption, strength: float, seed: int, scale: np.ndarray) -> Tensor:
    batch, is_uint8 = data if data.dim() == 4 else data.unsqueeze(0), data.dtype == torch.uint8
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not (data.is_floating_point() or is_uint8):
        raise ValueError(
            f"images is {data.dtype} of shape {tuple(data.shape)}: pass uint8, or floats in [0, 1], of shape (rows, channels, "
            "height, width) or (channels, height, width), with 1 or 3 channels"
        )
    mean, std = (torch.tensor(values.tolist(), device=data.device).view(1, -1, 1, 1) for values in scale)
    parts = []
    for part in batch.split(max(1, VALUES_AT_A_TIME // math.prod(batch.shape[1:]))) if len(batch) else ():
        unit = (part.float() / 255 if is_uint8 else _unscaled(part, mean, std)).contiguous()
        changed = corruption.change(unit, strength, on_images.row_keys(unit, corruption.name, seed)).clamp(0, 1)
        parts.append((changed * 255).round().byte() if is_uint8 else ((changed - mean) / std).to(data.dtype))
    return torch.cat(parts).view(data.shape) if parts else data


def _corrupted_picture(picture: Any, corruption: Corruption, strength: float, seed: int) -> Any:
    """A PIL image; any mode but grey becomes RGB."""
    from PIL import Image

    picture = read_image(picture, mode="L" if picture.mode == "L" else "RGB")
    pixels = torch.from_numpy(np.array(picture)).view(picture.height, picture.width, -1).permute(2, 0, 1)
    array = _corrupted_tensor(pixels, corruption, strength, seed, pixel_scale()).permute(1, 2, 0).numpy()
    return Image.fromarray(array if array.shape[2] == 3 else array[..., 0])


def pixel_scale(processor: Any = None) -> np.ndarray:
    """Mean and standard deviation of an image processor, also inside CLIP's, (2, channels), or (2, 1) for all channels:
    pixel_values = (images in [0, 1] - mean) / std."""
    processor, scale = getattr(processor, "image_processor", processor), np.array([[0.0], [1.0]])
    if processor is None:
        return scale
    if processor.do_normalize:
        scale = np.array([processor.image_mean, processor.image_std], dtype=float).reshape(2, -1)
    if getattr(processor, "do_rescale", True):
        return scale / (255 * processor.rescale_factor)
    # Images were in [0, 1] before, unless the mean is one of levels up to 255.
    return scale / (255.0 if scale[0].max() > 1 else 1.0)


def _unscaled(pixel_values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(rows, channels, height, width) -> float32 images in [0, 1]; raises for values outside."""
    # Two statements, each rounded by itself: fused on a device, they would have other last digits.
    images = pixel_values.float() * std
    images = images + mean
    low, high = images.amin().item(), images.amax().item()
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise ValueError(
            f"the images hold values from {low:.3g} to {high:.3g}, not 0 to 1: pass the processor that made them as processor="
        )
    return images.clamp(0, 1)


def corruption_named(name: str, kind: str, severity: int = 1) -> Corruption:
    """Raises for another kind of data, and for severities that there are not."""
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity}: pass whole numbers from 1 to 5")
    if name not in CORRUPTIONS:
        raise ValueError(f"no corruption is called {name!r}: there are {', '.join(CORRUPTIONS)}")
    if CORRUPTIONS[name].kind != kind:
        raise ValueError(f"{name} is for {CORRUPTIONS[name].kind}s, and the data are {kind}s: choose others, or all")
    return CORRUPTIONS[name]


def names_of(chosen: str | Sequence[str], kind: str) -> list[str]:
    """Corruptions of a kind ("image", "text") by name, by group, or "all" of them; each once, in the order given."""
    names: list[str] = []
    for name in [chosen] if isinstance(chosen, str) else chosen:
        members = [
            item.name for item in CORRUPTIONS.values() if name in (item.group, "all" if item.kind == kind else None)
        ]
        names += [corruption_named(member, kind).name for member in members or [name]]
    return list(dict.fromkeys(names))
