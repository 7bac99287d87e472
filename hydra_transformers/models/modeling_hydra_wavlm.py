"""HydraWavLM: M head-pruned WavLM encoders as one network.

WavLM adds to each head's scores a number that depends on how far two frames are apart, from one table for all layers, which each head
of each layer weighs by what it reads.
"""

import torch
from torch import nn
from transformers import WavLMForSequenceClassification, WavLMModel
from transformers.models.wavlm.modeling_wavlm import (
    WavLMAttention,
    WavLMFeatureEncoder,
    WavLMFeatureProjection,
    WavLMPositionalConvEmbedding,
    WavLMPreTrainedModel,
)

from .configuration_hydra_wavlm import HydraWavLMConfig
from .pretrained import HydraModelMixin, Rule
from .waveforms import (
    WAVEFORM_RULES,
    HydraWaveformClassifierMixin,
    HydraWaveformEncoderMixin,
    HydraWaveformMixin,
)


class HydraWavLMPreTrainedModel(HydraWaveformMixin, HydraModelMixin, WavLMPreTrainedModel):
    config_class = HydraWavLMConfig
    config: HydraWavLMConfig
    base_model_prefix = "wavlm"
    architecture = "WavLM"
    _no_split_modules = ["HydraWaveformEmbeddings", "HydraLayer"]
    backbone_types = ("wavlm",)
    _supports_sdpa = True
    backbone_calls_projections = False
    backbone_rules = (
        *WAVEFORM_RULES,
        Rule("layers.*.attention.bias_gate.maps.*", "encoder.layers.*.attention.gru_rel_pos_linear.*"),
        Rule(
            "layers.*.attention.bias_gate.weight",
            "encoder.layers.*.attention.gru_rel_pos_const",
            lambda weight: weight.reshape(-1, 1),
        ),
        Rule("relative_attention_bias.weight", "encoder.layers.0.attention.rel_attn_embed.weight"),
    )


class WavLMPositionBias(nn.Embedding):
    """What positions add to the scores of each of the backbone's heads; weight (buckets of distances, heads)."""

    _relative_positions_bucket = WavLMAttention._relative_positions_bucket

    def __init__(self, config: HydraWavLMConfig):
        super().__init__(config.num_buckets, config.num_attention_heads)
        self.num_buckets, self.max_distance = config.num_buckets, config.max_bucket_distance

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """For states (members or 1, batch, frames, hidden): (heads, frames, frames)"""
        positions = torch.arange(states.shape[2], device=states.device)
        buckets = self._relative_positions_bucket(positions[None, :] - positions[:, None])
        return super().forward(buckets).permute(2, 0, 1)


class HydraWavLMModel(HydraWaveformEncoderMixin, HydraWavLMPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`; pooled is the mean of the frames that are no padding."""

    backbone_classes = (WavLMModel,)
    parts = (WavLMFeatureEncoder, WavLMFeatureProjection, WavLMPositionalConvEmbedding)
    position_bias_class = WavLMPositionBias


class HydraWavLMForSequenceClassification(HydraWaveformClassifierMixin, HydraWavLMPreTrainedModel):
    """The fused audio classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (WavLMForSequenceClassification,)
    encoder_class = HydraWavLMModel


__all__ = ["HydraWavLMForSequenceClassification", "HydraWavLMModel", "HydraWavLMPreTrainedModel"]
