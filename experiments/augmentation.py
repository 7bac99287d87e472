"""Random changes to a batch of images on its device: (batch, channels, height, width) in [0, 1]."""

import torch
from torch import Tensor


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


def changed_colours(images: Tensor, most: float) -> Tensor:
    """Change brightness, contrast and saturation of each image, each by a factor between 1 - `most` and 1 + `most`."""
    shape = (len(images), 1, 1, 1)
    brightness, contrast, saturation = (1 + most * (2 * torch.rand(3, *shape, device=images.device) - 1)).unbind()
    images = (images * brightness).clamp(0, 1)
    images = torch.lerp(images.mean(dim=(1, 2, 3), keepdim=True), images, contrast).clamp(0, 1)
    return torch.lerp(images.mean(dim=1, keepdim=True), images, saturation).clamp(0, 1)
