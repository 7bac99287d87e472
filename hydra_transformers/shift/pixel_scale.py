"""The scale of an image processor's pixel values, and the way back to [0, 1]."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


TOLERANCE = 0.05  # resizing overshoots a little at edges


@dataclass(frozen=True)
class PixelScale:
    """pixel_values = (images in [0, 1] - mean) / std, with one number per channel or one for all."""

    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)

    @classmethod
    def of(
        cls,
        processor: Any = None,
        mean: float | Sequence[float] | None = None,
        std: float | Sequence[float] | None = None,
    ) -> "PixelScale":
        """The scale of an image processor (also inside CLIP's), or of a mean and a standard deviation; else [0, 1]."""
        if (mean is None) != (std is None) or (processor is not None and mean is not None):
            raise ValueError(
                "the scale of images is a mean and a std, or a processor: pass both of the former, or the latter"
            )
        if processor is None:
            return cls() if mean is None else cls(_numbers(mean), _numbers(std))
        processor = getattr(processor, "image_processor", processor)
        if not hasattr(processor, "do_normalize"):
            raise TypeError(f"processor is a {type(processor).__name__}: pass the model's image processor")
        mean, std = (processor.image_mean, processor.image_std) if processor.do_normalize else (0.0, 1.0)
        if getattr(processor, "do_rescale", True):
            rescaled = 255 * processor.rescale_factor
        else:
            # Images were in [0, 1] before, unless the mean is one of levels up to 255.
            rescaled = 255.0 if max(_numbers(mean)) > 1 else 1.0
        return cls(*(tuple(value / rescaled for value in _numbers(values)) for values in (mean, std)))

    def unscaled(self, pixel_values: Tensor) -> Tensor:
        """(rows, channels, height, width) -> float32 images in [0, 1]; raises for values outside."""
        mean, std = self._constants(pixel_values.device)
        # Two statements, each rounded by itself: fused on a device, they would have other last digits.
        images = pixel_values.float() * std
        images = images + mean
        low, high = images.amin().item(), images.amax().item()
        if not (low >= -TOLERANCE and high <= 1 + TOLERANCE):
            raise ValueError(
                f"the images hold values from {low:.3g} to {high:.3g}, not from 0 to 1: pass the image processor that made them "
                "as processor=, or mean= and std="
            )
        return images.clamp(0, 1)

    def scaled(self, images: Tensor, dtype: torch.dtype) -> Tensor:
        mean, std = self._constants(images.device)
        return ((images - mean) / std).to(dtype)

    def _constants(self, device: torch.device) -> list[Tensor]:
        return [torch.tensor(values, device=device).view(1, -1, 1, 1) for values in (self.mean, self.std)]


def _numbers(value: float | Sequence[float] | Tensor) -> tuple[float, ...]:
    return tuple(np.asarray(value, dtype=float).reshape(-1).tolist())
