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
    """A way to corrupt images or texts, named as in ImageNet-C where it has it.

    name: of the function; `CORRUPTIONS` has all of them
    kind: what it changes, "image" or "text"
    group: of corruptions alike, such as "noise"
    strengths: one for each severity
    change: the function, see `image_corruptions` and `text_corruptions`
    """

    name: str
    kind: str
    group: str
    strengths: tuple[float, float, float, float, float]
    change: Callable


# Noise, zoom, brightness, contrast, pixelate and JPEG have ImageNet-C's strengths. Its blurs are in
# pixels of images 224 wide, and it also desaturates.
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
    """Return corrupted images or texts; `data` stays as it is.

    Args:
        data (`torch.Tensor`, `PIL.Image.Image`, `str` or `list`): a tensor of images, (rows,
            channels, height, width) or (channels, height, width), with 1 or 3 channels: uint8,
            floats in [0, 1], or such images scaled by `processor`; a PIL image; a text; or a list
            of texts or PIL images.
        name (`str`): of a corruption, such as "gaussian_noise"; an unknown one raises an error that
            lists all.
        severity (`int`): 1 to 5.
        seed (`int`, defaults to 0): the result depends on it and on the image or text alone, not on
            its batch or place; all severities use the same random numbers.
        processor (image processor, *optional*): what scaled the images. They are scaled back,
            corrupted, clamped to [0, 1] and scaled again.

    Returns the same type, device and dtype as `data`.
    """
    if isinstance(data, (list, tuple)):
        return [corrupt(value, name, severity, seed, processor=processor) for value in data]

    is_text = isinstance(data, str)
    corruption = corruption_named(name, "text" if is_text else "image", severity)
    strength = corruption.strengths[severity - 1]
    if is_text:
        generator = random.Random(on_images.key_of(name, seed, data))
        return corruption.change(data, strength, generator)
    if isinstance(data, Tensor):
        return _corrupted_tensor(data, corruption, strength, seed, pixel_scale(processor))
    if hasattr(data, "convert") and hasattr(data, "size"):
        return _corrupted_picture(data, corruption, strength, seed)
    raise TypeError(f"data is a {type(data).__name__}, not images or texts: for data sets use corrupted(data, ...)")


@torch.no_grad()
def _corrupted_tensor(data: Tensor, corruption: Corruption, strength: float, seed: int, scale: np.ndarray) -> Tensor:
    """Corrupt images; `scale` is from `pixel_scale`.

    (rows, channels, height, width) or (channels, height, width) -> the same shape
    """
    # What may come in: uint8 or floats, grey or RGB, one image or several.
    batch = data
    if data.dim() != 4:
        batch = data.unsqueeze(0)
    is_uint8 = data.dtype == torch.uint8
    has_levels = is_uint8 or data.is_floating_point()
    if batch.dim() != 4 or batch.shape[1] not in (1, 3) or not has_levels:
        raise ValueError(
            f"images is {data.dtype} of shape {tuple(data.shape)}: pass uint8, or floats in [0, 1], of shape (rows, "
            "channels, height, width) or (channels, height, width), with 1 or 3 channels"
        )
    if len(batch) == 0:
        return data
    mean, std = (torch.tensor(values.tolist(), device=data.device).view(1, -1, 1, 1) for values in scale)

    # A few images at a time, each in [0, 1] and then back on its scale.
    values_per_image = math.prod(batch.shape[1:])
    images_at_a_time = max(1, VALUES_AT_A_TIME // values_per_image)
    parts = []
    for part in batch.split(images_at_a_time):
        if is_uint8:
            images = part.float() / 255
        else:
            images = _unscaled(part, mean, std)
        images = images.contiguous()
        keys = on_images.row_keys(images, corruption.name, seed)
        changed = corruption.change(images, strength, keys).clamp(0, 1)
        if is_uint8:
            parts.append((changed * 255).round().byte())
        else:
            parts.append(((changed - mean) / std).to(data.dtype))
    return torch.cat(parts).view(data.shape)


def _corrupted_picture(picture: Any, corruption: Corruption, strength: float, seed: int) -> Any:
    """Corrupt a PIL image; any mode but grey becomes RGB."""
    from PIL import Image

    mode = "L" if picture.mode == "L" else "RGB"
    picture = read_image(picture, mode=mode)
    pixels = torch.from_numpy(np.array(picture)).view(picture.height, picture.width, -1)
    images = pixels.permute(2, 0, 1)  # (channels, height, width)
    changed = _corrupted_tensor(images, corruption, strength, seed, pixel_scale())
    array = changed.permute(1, 2, 0).numpy()
    if mode == "L":
        array = array[..., 0]
    return Image.fromarray(array)


def pixel_scale(processor: Any = None) -> np.ndarray:
    """Return mean and standard deviation of an image processor, also of the one inside CLIP's.

    pixel_values = (images in [0, 1] - mean) / std; shape (2, channels), or (2, 1) for all channels.
    """
    scale = np.array([[0.0], [1.0]])
    processor = getattr(processor, "image_processor", processor)
    if processor is None:
        return scale
    if processor.do_normalize:
        scale = np.array([processor.image_mean, processor.image_std], dtype=float).reshape(2, -1)
    if getattr(processor, "do_rescale", True):
        return scale / (255 * processor.rescale_factor)
    # Images were in [0, 1] before, unless the mean is one of levels up to 255.
    if scale[0].max() > 1:
        return scale / 255.0
    return scale


def _unscaled(pixel_values: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return float32 images in [0, 1], (rows, channels, height, width); raise for others."""
    # Two statements, each rounded by itself: fused on a device, they would have other last digits.
    images = pixel_values.float() * std
    images = images + mean

    low = images.amin().item()
    high = images.amax().item()
    # Not `low < ... or high > ...`, which is false for NaN.
    if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
        raise ValueError(
            f"the images hold values from {low:.3g} to {high:.3g}, not 0 to 1: pass the processor that made them as "
            "processor="
        )
    return images.clamp(0, 1)


def corruption_named(name: str, kind: str, severity: int = 1) -> Corruption:
    """Return a corruption; raise for another kind of data, and for a severity beyond 1 to 5."""
    if severity not in SEVERITIES:
        raise ValueError(f"severity is {severity}: pass whole numbers from 1 to 5")
    if name not in CORRUPTIONS:
        raise ValueError(f"no corruption is called {name!r}: there are {', '.join(CORRUPTIONS)}")
    corruption = CORRUPTIONS[name]
    if corruption.kind != kind:
        raise ValueError(f"{name} is for {corruption.kind}s, and the data are {kind}s: choose others, or all")
    return corruption


def corruption_names(chosen: str | Sequence[str], kind: str) -> list[str]:
    """Return the corruptions of a kind by name, by group, or all; each once, in the order given.

    Args:
        chosen (`str` or `Sequence[str]`): names of corruptions or of groups, or "all".
        kind (`str`): "image" or "text".
    """
    if isinstance(chosen, str):
        chosen = [chosen]

    names: list[str] = []
    for name in chosen:
        if name == "all":
            names += [item.name for item in CORRUPTIONS.values() if item.kind == kind]
            continue
        group = [item.name for item in CORRUPTIONS.values() if item.group == name]
        for member in group or [name]:
            names.append(corruption_named(member, kind).name)
    return list(dict.fromkeys(names))
