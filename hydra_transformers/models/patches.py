"""Patch embedding as a matrix product."""

import torch
from torch import nn


class PatchProjection(nn.Conv2d):
    """A convolution whose kernels do not overlap, which is one product over the patches: several times as fast as the
    convolution kernels, with the same weights."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, hidden, rows of patches, columns of patches)"""
        batch, channels, full_height, full_width = pixel_values.shape
        height, width = self.kernel_size
        rows, columns = full_height // height, full_width // width
        pixel_values = pixel_values[..., : rows * height, : columns * width]
        patches = pixel_values.reshape(batch, channels, rows, height, columns, width).permute(0, 2, 4, 1, 3, 5)
        patches = patches.reshape(batch, rows * columns, channels * height * width)
        hidden_states = nn.functional.linear(patches, self.weight.flatten(1), self.bias)
        return hidden_states.transpose(1, 2).view(batch, -1, rows, columns)


def as_patch_projection(convolution: nn.Conv2d) -> PatchProjection:
    """A new patch projection in the shape of a Transformers model's convolution."""
    return PatchProjection(
        convolution.in_channels,
        convolution.out_channels,
        convolution.kernel_size,
        stride=convolution.stride,
        bias=convolution.bias is not None,
    )
