"""HydraWavLM: M head-pruned WavLM encoders as one network.

WavLM adds to each head's scores a number that depends on how far two frames are apart, from one table for all layers, which each head
of each layer weighs by what it reads.
"""

from collections.abc import Sequence
from functools import partial

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
from .modeling_hydra import Grouped, Norm, PerMember, shared_or_per_member
from .pretrained import HydraModelMixin, Rule
from .relative_attention import HydraBiasedAttention
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
    _no_split_modules = ["HydraWaveformEmbeddings", "HydraLayerWithDrop"]
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


class BiasGate(Grouped):
    """How much each head of each token adds of the bias of positions; weight (sum of heads, 1).

    maps: of each member, from a head's part of the states to eight numbers
    """

    def __init__(self, config: HydraWavLMConfig, layer: int, heads: Sequence[int], head_dim: int):
        super().__init__(heads, 1, None)
        self.maps = shared_or_per_member(config, "attention", partial(nn.Linear, head_dim, 8), layer)

    def forward(self, hidden_states: torch.Tensor, kept_heads: list[list[int]]) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (batch, heads of all members, tokens, 1)"""
        maps = self.maps if isinstance(self.maps, PerMember) else [self.maps]
        states = hidden_states.expand(len(maps), *hidden_states.shape[1:]).unflatten(-1, (-1, maps[0].in_features))
        gates = [
            map_of_member(states[member][..., heads, :]).unflatten(-1, (2, 4)).sum(dim=-1).sigmoid()
            for member, (map_of_member, heads) in enumerate(zip(maps, kept_heads, strict=True))
            if heads
        ]
        first, second = torch.cat(gates, dim=2).transpose(1, 2).chunk(2, dim=-1)
        return first * (second * self.weight.unsqueeze(1) - 1) + 2


class HydraWavLMAttention(HydraBiasedAttention):
    """Each head weighs the bias of positions by its own part of the states that the attention reads."""

    def __init__(self, config: HydraWavLMConfig, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        self.bias_gate = BiasGate(config, layer, [len(heads) for heads in self.kept_heads], self.head_dim)

    def rows_per_head(self) -> dict[str, int]:
        return {"bias_gate": 1}

    def bias(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, position_bias: torch.Tensor
    ) -> torch.Tensor:
        bias = super().bias(hidden_states, query, key, position_bias)
        return self.bias_gate(hidden_states[:, :, : query.shape[2]], self.kept_heads) * bias


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
    attention_class = HydraWavLMAttention


class HydraWavLMForSequenceClassification(HydraWaveformClassifierMixin, HydraWavLMPreTrainedModel):
    """The fused audio classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (WavLMForSequenceClassification,)
    encoder_class = HydraWavLMModel


__all__ = ["HydraWavLMForSequenceClassification", "HydraWavLMModel", "HydraWavLMPreTrainedModel"]
