"""Encoders and classifiers of images."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .modeling_hydra import HydraClassifierMixin, HydraClassifierOutput, HydraEncoderMixin, HydraModelOutput


class HydraImageEncoderMixin(HydraEncoderMixin):
    """A fused encoder of images, without a head: `HydraModelOutput`."""

    patch_embeddings_name = "patch_embeddings"  # inside of the embeddings

    def get_input_embeddings(self) -> nn.Module:
        """Return the patch embeddings; those of the first member where members do not share
        them."""
        return getattr(self.first_embeddings(), self.patch_embeddings_name)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """
        pixel_values: (batch, channels, height, width)
        kwargs: of `encode`, too
        """
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass the image processor's output")
        if kwargs.pop("bool_masked_pos", None) is not None:
            raise ValueError("bool_masked_pos is for masked image modelling, which a Hydra does not do: leave it out")
        inputs = {"pixel_values": pixel_values, "attention_mask": attention_mask}
        if interpolate_pos_encoding is not None:  # not every family has it
            inputs["interpolate_pos_encoding"] = interpolate_pos_encoding
        return self.encode(inputs, **kwargs)


class HydraImageClassifierMixin(HydraClassifierMixin):
    """A fused image classifier: `logits` is the ensemble's prediction, `member_logits` each
    member's."""

    def pipeline_class(self) -> type:
        from .pipeline_hydra import HydraImageClassificationPipeline  # not above, as in `predict`

        return HydraImageClassificationPipeline

    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        pixel_values: (batch, channels, height, width)
        labels: (batch,) class indices, or what the task's loss takes
        """
        inputs = {
            "pixel_values": pixel_values,
            "attention_mask": attention_mask,
            "interpolate_pos_encoding": interpolate_pos_encoding,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


class PatchProjection(nn.Conv2d):
    """A convolution whose kernels do not overlap, which is one product over the patches: several
    times as fast as the convolution kernels, with the same weights."""

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """(batch, channels, height, width) -> (batch, hidden, rows of patches, columns of
        patches)"""
        height, width = self.kernel_size
        rows = pixel_values.shape[2] // height
        columns = pixel_values.shape[3] // width
        pixel_values = pixel_values.to(self.weight.dtype)
        patches = pixel_values[..., : rows * height, : columns * width]
        patches = patches.unflatten(3, (columns, width)).unflatten(2, (rows, height))
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3)  # (batch, rows, columns, numbers of a patch)
        hidden_states = nn.functional.linear(patches, self.weight.flatten(1), self.bias)
        return hidden_states.permute(0, 3, 1, 2)


class PatchProductMixin:
    """A backbone's embeddings of images with the patches embedded by a product."""

    convolution_name = "patch_embeddings.projection"

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        old = self.get_submodule(self.convolution_name)
        new = PatchProjection(
            old.in_channels, old.out_channels, old.kernel_size, old.stride, bias=old.bias is not None
        )
        self.set_submodule(self.convolution_name, new)
