"""Encoders and classifiers of images."""

import torch
from torch import nn
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import encoder_mask
from .encoder import HydraEncoderMixin
from .ensembling import HydraClassifierMixin, HydraClassifierOutput, HydraModelOutput
from .grouped import embed


class HydraImageEncoderMixin(HydraEncoderMixin):
    """An encoder of images: embeddings of patches."""

    def get_input_embeddings(self) -> nn.Module:
        """The patch embeddings; those of the first member where members do not share them."""
        return self.first_embeddings().patch_embeddings

    def start(
        self, pixel_values: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **for_embeddings
    ):
        if pixel_values is None:
            raise ValueError("pixel_values is missing: pass the image processor's output")
        dtype = self.get_input_embeddings().projection.weight.dtype
        states = embed(self.embeddings, pixel_values.to(dtype), **for_embeddings)
        return states, encoder_mask(self.config, states, attention_mask), {}

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        members_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        pixel_values: (batch, channels, height, width)
        first_token_only, members_only: compute no more than a classifier reads, see `encode`
        """
        if kwargs.pop("bool_masked_pos", None) is not None:
            raise ValueError("bool_masked_pos is for masked image modelling, which a Hydra does not do: leave it out")
        asked = {} if interpolate_pos_encoding is None else {"interpolate_pos_encoding": interpolate_pos_encoding}
        states, mask, for_layers = self.start(pixel_values, attention_mask, **asked)
        return self.encode(states, mask, first_token_only, members_only, **for_layers, **kwargs)


class HydraImageClassifierMixin(HydraClassifierMixin):
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
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        """
        inputs = {
            "pixel_values": pixel_values,
            "interpolate_pos_encoding": interpolate_pos_encoding,
            "attention_mask": attention_mask,
        }
        return self.answer(labels, inputs, **kwargs)
