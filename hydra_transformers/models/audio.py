"""Encoders and classifiers of audio."""

import torch
from torch import nn
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .modeling_hydra import (
    HydraClassifierMixin,
    HydraClassifierOutput,
    HydraEncoderMixin,
    HydraModelOutput,
    embed,
    encoder_mask,
)


class HydraAudioEncoderMixin(HydraEncoderMixin):
    """A fused encoder of spectrograms, without a head: `HydraModelOutput`."""

    def get_input_embeddings(self) -> nn.Module:
        """The patch embeddings; those of the first member where members do not share them."""
        return self.first_embeddings().patch_embeddings

    def embed_inputs(self, input_values: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None):
        frames, mel_bins = self.config.max_length, self.config.num_mel_bins
        if self._patches(*input_values.shape[1:]) != self._patches(frames, mel_bins):
            raise ValueError(
                f"input_values has {input_values.shape[1]} frames of {input_values.shape[2]} mel bins, the model reads {frames} "
                f"of {mel_bins}: give the feature extractor max_length={frames} and num_mel_bins={mel_bins}"
            )
        dtype = self.get_input_embeddings().projection.weight.dtype
        hidden_states = embed(self.embeddings, input_values.to(dtype))
        mask = None if attention_mask is None else encoder_mask(self.config, hidden_states, attention_mask)
        return hidden_states, mask, {}

    def _patches(self, frames: int, mel_bins: int) -> tuple[int, int]:
        """How many patches a spectrogram has along its time and along its frequencies."""
        size, config = self.config.patch_size, self.config
        return (frames - size) // config.time_stride, (mel_bins - size) // config.frequency_stride

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_values: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_values: (batch, frames, mel bins)
        attention_mask: (batch, tokens)
        kwargs: of `encode`, too
        """
        inputs = {"input_values": input_values, "attention_mask": attention_mask}
        return self.encode(inputs, **kwargs)


class HydraAudioClassifierMixin(HydraClassifierMixin):
    """A fused audio classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    def pipeline_class(self) -> type:
        from .pipeline_hydra_audio import HydraAudioClassificationPipeline  # not above, as in `predict`

        return HydraAudioClassificationPipeline

    @can_return_tuple
    def forward(
        self,
        input_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        input_values: (batch, frames, mel bins)
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        attention_mask: (batch, tokens)
        """
        inputs = {"input_values": input_values, "attention_mask": attention_mask}
        return self.encode_and_classify(inputs, labels, **kwargs)
