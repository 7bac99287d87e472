"""Random changes to a batch of images on its device: (batch, channels, height, width) in [0, 1]."""

import math

import torch
from torch import Tensor


def crop_and_flip(images: Tensor, padding: int = 4) -> Tensor:
    """A crop of the size of the image out of the image with a border of `padding`, mirrored half of the time."""
    batch, _, height, width = images.shape
    device = images.device
    padded = torch.nn.functional.pad(images, [padding] * 4, mode="reflect")
    top, left = torch.randint(0, 2 * padding + 1, (2, batch, 1), device=device)
    rows = top + torch.arange(height, device=device)
    columns = left + torch.arange(width, device=device)
    mirrored = torch.rand(batch, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    samples = torch.arange(batch, device=device)
    # Indices around a slice put the channels last.
    cropped = padded[samples[:, None, None], :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2).contiguous()


def resized_crop_and_flip(images: Tensor, size: int, least: float = 0.7) -> Tensor:
    """A crop of `least` to all of an image's area, enlarged to `size` pixels a side and mirrored half of the time."""
    batch, channels, _, _ = images.shape
    device = images.device
    side = (least + (1 - least) * torch.rand(batch, device=device)).sqrt()
    across, down = (2 * torch.rand(2, batch, device=device) - 1) * (1 - side)
    mirrored = torch.where(torch.rand(batch, device=device) < 0.5, -side, side)
    zero = torch.zeros_like(side)
    matrix = torch.stack([mirrored, zero, across, zero, side, down], dim=1).view(batch, 2, 3)
    grid = torch.nn.functional.affine_grid(matrix, [batch, channels, size, size], align_corners=False)
    return torch.nn.functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)


def turn_and_shear(images: Tensor, degrees: float = 25.0, shear: float = 0.3, scale: float = 0.25) -> Tensor:
    """An affine change of two images in three."""
    batch, device = len(images), images.device
    angle, slant, log_size = torch.rand(3, batch, device=device) * 2 - 1
    angle, slant, size = angle * math.radians(degrees), slant * shear, (log_size * scale).exp()
    cos, sin, zero = angle.cos() * size, angle.sin() * size, torch.zeros_like(angle)
    matrix = torch.stack([cos, slant - sin, zero, sin, cos, zero], dim=1).view(batch, 2, 3)
    grid = torch.nn.functional.affine_grid(matrix, list(images.shape), align_corners=False)
    changed = torch.nn.functional.grid_sample(images, grid, padding_mode="reflection", align_corners=False)
    return torch.where(_some(batch, 2 / 3, device), changed, images)


def change_colours(images: Tensor, strength: float = 0.4) -> Tensor:
    """Brightness, contrast and saturation, each by a factor of 1 ± strength."""
    brightness, contrast, saturation = 1 + strength * (
        torch.rand(3, len(images), 1, 1, 1, device=images.device) * 2 - 1
    )
    images = images * brightness
    mean = images.mean(dim=(1, 2, 3), keepdim=True)
    images = mean + (images - mean) * contrast
    grey = images.mean(dim=1, keepdim=True)
    return (grey + (images - grey) * saturation).clamp(0, 1)


def change_look(images: Tensor) -> Tensor:
    """One of five changes, or none: solarised, in few shades, grey, blurred or sharpened, with full contrast."""
    batch, device = len(images), images.device
    strength = torch.rand(batch, 1, 1, 1, device=device)
    solarised = torch.where(images > 0.3 + 0.7 * strength, 1 - images, images)
    shades = (4 + 12 * strength).floor()
    posterised = (images * shades).floor() / shades
    grey = images.mean(dim=1, keepdim=True).expand_as(images)
    blurred = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(images, [1] * 4, mode="reflect"), 3, stride=1)
    sharpened = (images + (2.5 * strength - 1) * (images - blurred)).clamp(0, 1)
    lowest, highest = images.amin(dim=(1, 2, 3), keepdim=True), images.amax(dim=(1, 2, 3), keepdim=True)
    stretched = (images - lowest) / (highest - lowest).clamp(min=1e-3)
    choice = torch.randint(0, 6, (batch, 1, 1, 1), device=device)
    for index, changed in enumerate((solarised, posterised, grey, sharpened, stretched)):
        images = torch.where(choice == index, changed, images)
    return images


def erase(images: Tensor, size: int = 16) -> Tensor:
    """A grey square of up to `size` pixels a side in every other image."""
    batch, _, height, width = images.shape
    device = images.device
    side = torch.randint(size // 2, size + 1, (batch, 1), device=device)
    top = (torch.rand(batch, 1, device=device) * (height - side + 1)).long()
    left = (torch.rand(batch, 1, device=device) * (width - side + 1)).long()
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    in_rows = (rows >= top) & (rows < top + side)
    in_columns = (columns >= left) & (columns < left + side)
    erased = (in_rows[:, :, None] & in_columns[:, None, :])[:, None]
    return torch.where(erased & _some(batch, 0.5, device), torch.full_like(images, 0.5), images)


def strong(images: Tensor) -> Tensor:
    """All of it: for training from scratch, where a transformer would otherwise learn the images by heart."""
    return erase(change_look(change_colours(turn_and_shear(crop_and_flip(images)))))


def _some(batch: int, share: float, device: torch.device) -> Tensor:
    return torch.rand(batch, 1, 1, 1, device=device) < share
