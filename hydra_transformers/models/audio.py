"""Classifiers of audio."""

import torch
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .modeling_hydra import HydraClassifierMixin, HydraClassifierOutput, HydraEncoderMixin, HydraModelOutput


class HydraAudioEncoderMixin(HydraEncoderMixin):
    """A fused encoder of audio, without a head: `HydraModelOutput`."""

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, input_values: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> HydraModelOutput:
        """
        input_values: spectrograms (batch, frames, mel bins), or raw audio (batch, samples)
        attention_mask: of spectrograms (batch, tokens), of raw audio (batch, samples)
        kwargs: of `encode`, too
        """
        return self.encode({"input_values": input_values, "attention_mask": attention_mask}, **kwargs)


class HydraAudioClassifierMixin(HydraClassifierMixin):
    """A fused audio classifier: `logits` is the ensemble's prediction, `member_logits` each
    member's."""

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
        input_values, attention_mask: as the encoder reads them
        labels: (batch,) class indices, or what the task's loss takes
        """
        inputs = {"input_values": input_values, "attention_mask": attention_mask}
        return self.encode_and_classify(inputs, labels, **kwargs)
