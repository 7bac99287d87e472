"""Mixed inputs: two images of a batch become one, and the loss counts the labels of both."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..models.task import task_of_config


MIXUP_ALPHA = 0.2  # of the Beta distribution that the share of the first image is drawn from
CUTMIX_ALPHA = 1.0


@dataclass(frozen=True)
class MixedLabels:
    """The labels of a batch of mixed inputs, which a loss counts by their shares.

    first, second: the labels of both images of each row, (batch, ...)
    share: of the first image
    """

    first: Tensor
    second: Tensor
    share: float | Tensor


def check_can_mix(model: nn.Module, compute_loss_func: Any) -> None:
    """Raise where images of a batch cannot be mixed, or where a loss does not know mixed labels."""
    config = getattr(model, "config", None)
    if getattr(model, "main_input_name", None) != "pixel_values" or hasattr(config, "text_config"):
        raise ValueError(f"mixing is for models that classify images: leave it out for a {type(model).__name__}")
    if task_of_config(config).predicts_numbers:
        raise ValueError("mixing is for labels that are classes: leave it out for a regression")
    if compute_loss_func is not None and not getattr(compute_loss_func, "takes_mixed_labels", False):
        raise ValueError("mixing needs a loss that counts two labels for each image: leave compute_loss_func out")


def mix_inputs(inputs: dict[str, Any], name: str = "pixel_values") -> dict[str, Any]:
    """Mix each image of a batch with another one, by mixup or by cutmix, each half of the time.

    One share for all rows is drawn from torch's global random state on the CPU, which Trainer's
    checkpoints hold.

    Args:
        inputs: A batch with images (batch, channels, height, width) and "labels".
        name: The name of the images.

    Returns:
        The batch with mixed images. Its "labels" are `MixedLabels`, or with labels of numbers
        (batch, classes), of which several may be right, their weighted mean.
    """
    images = inputs[name]
    labels = inputs["labels"]
    others = torch.randperm(len(images)).to(images.device)
    if torch.rand(()) < 0.5:
        share = draw_share(MIXUP_ALPHA)
        mixed = torch.lerp(images[others], images, share)
    else:
        mixed, share = cut_and_paste(images, images[others], draw_share(CUTMIX_ALPHA))
    if labels.is_floating_point():
        mixed_labels = torch.lerp(labels[others], labels, share)
    else:
        mixed_labels = MixedLabels(labels, labels[others], share)
    return {**inputs, name: mixed, "labels": mixed_labels}


def draw_share(alpha: float) -> float:
    """Draw from Beta(alpha, alpha)."""
    first, second = torch._standard_gamma(torch.full((2,), alpha)).tolist()
    total = first + second
    if total > 0:
        return first / total
    return 0.5


def cut_and_paste(images: Tensor, others: Tensor, share: float) -> tuple[Tensor, float]:
    """Paste a box of other images into images, about 1 - `share` of their area.

    Returns:
        The images, and the share of them that is left.
    """
    height, width = images.shape[-2:]
    side = math.sqrt(1 - share)
    middle_row = int(torch.randint(height, ()))
    middle_column = int(torch.randint(width, ()))

    # The box may reach over the edges, which cut it off.
    top, bottom = edges_of(middle_row, int(side * height), height)
    left, right = edges_of(middle_column, int(side * width), width)
    result = images.clone()
    result[..., top:bottom, left:right] = others[..., top:bottom, left:right]

    pasted = (bottom - top) * (right - left) / (height * width)
    return result, 1 - pasted


def edges_of(middle: int, length: int, size: int) -> tuple[int, int]:
    """Return where a stretch of this length begins and ends, within 0 to `size`."""
    first = middle - length // 2
    end = first + length
    return max(0, first), min(size, end)
