"""HydraWav2Vec2, HydraHubert, HydraWavLM and HydraWhisper: M head-pruned encoders of audio as one
network.

Convolutions make frames of the samples, and a convolution adds their positions. WavLM also adds to
each head's scores a number that depends on how far two frames are apart, from one table for all
layers, which each head of each layer weighs by what it reads.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.models.hubert.modeling_hubert import (
    HubertFeatureEncoder,
    HubertFeatureProjection,
    HubertPositionalConvEmbedding,
    HubertPreTrainedModel,
)
from transformers.models.wav2vec2.modeling_wav2vec2 import (
    Wav2Vec2FeatureEncoder,
    Wav2Vec2FeatureProjection,
    Wav2Vec2PositionalConvEmbedding,
    Wav2Vec2PreTrainedModel,
)
from transformers.models.wavlm.modeling_wavlm import (
    WavLMAttention,
    WavLMFeatureEncoder,
    WavLMFeatureProjection,
    WavLMPositionalConvEmbedding,
    WavLMPreTrainedModel,
)
from transformers.models.whisper.modeling_whisper import WhisperEncoder, WhisperPreTrainedModel, sinusoids
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .audio import HydraAudioClassifierMixin, HydraAudioEncoderMixin
from .configuration_hydra_waveforms import HydraHubertConfig, HydraWav2Vec2Config, HydraWavLMConfig, HydraWhisperConfig
from .modeling_hydra import (
    Grouped,
    GroupedLinear,
    HydraAttention,
    HydraClassifierOutput,
    HydraEncoderMixin,
    HydraLayer,
    HydraModelOutput,
    Norm,
    PerMember,
    shared_or_per_member,
)
from .pretrained import HydraModelMixin
from .relative_attention import HydraTableBiasAttention, PositionBias


class HydraWaveformEmbeddings(nn.Module):
    """From samples to the states that enter the first layer.

    parts: the backbone's classes of the convolutions, of the map behind them, and of the positions
    backbone: its class
    """

    def __init__(self, config: PreTrainedConfig, parts: tuple[type[nn.Module], ...], backbone: type[nn.Module]):
        super().__init__()
        self.config = config
        self.backbone = backbone
        make_extractor, make_projection, make_positions = parts
        self.feature_extractor = make_extractor(config)
        self.feature_projection = make_projection(config)
        self.pos_conv_embed = make_positions(config)
        if config.mask_time_prob > 0 or config.mask_feature_prob > 0:
            self.masked_spec_embed = nn.Parameter(torch.rand(config.hidden_size))
        self.layer_norm = None
        if not config.do_stable_layer_norm:
            self.layer_norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, input_values: torch.Tensor, frame_mask: torch.Tensor | None = None) -> torch.Tensor:
        """(batch, samples) -> (batch, frames, hidden), in training with dropout per member a
        leading axis of members

        frame_mask: (batch, frames), False for padding
        """
        states = self.feature_projection(self.feature_extractor(input_values).transpose(1, 2))
        if isinstance(states, tuple):
            states = states[0]
        # SpecAugment: in training, frames and features are left out at random.
        states = self.backbone._mask_hidden_states(self, states, attention_mask=frame_mask)
        if frame_mask is not None:
            states = states.masked_fill(~frame_mask.unsqueeze(-1), 0)
        states = states + self.pos_conv_embed(states)
        if self.layer_norm is not None:
            states = self.layer_norm(states)
        return self.dropout(states)


def frames_of(samples, config: PreTrainedConfig):
    """Return how many frames the convolutions make of so many samples, a number or a tensor of
    numbers."""
    for kernel, stride in zip(config.conv_kernel, config.conv_stride, strict=True):
        samples = (samples - kernel) // stride + 1
    return samples


class HydraLayerWithDrop(HydraLayer):
    """A layer that is left out at times in training, for all members at once."""

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm, attention_class: type[HydraAttention]):
        super().__init__(config, layer, norm, attention_class)
        self.layer_drop = config.layerdrop

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, first_token_only=False, *positions, **kwargs):
        if self.layer_drop and self.training and torch.rand([]) < self.layer_drop:
            if first_token_only:
                hidden_states = hidden_states[:, :, :1]
            return hidden_states.expand(self.attention.num_members, *hidden_states.shape[1:])
        return super().forward(hidden_states, attention_mask, first_token_only, *positions, **kwargs)


class HydraWaveformMixin:
    """What encoders and classifiers of waveforms have in common, also weights that only a
    fine-tuning has."""

    _no_split_modules = ["HydraWaveformEmbeddings", "HydraLayerWithDrop"]

    def freeze_feature_encoder(self) -> None:
        """Keeps the convolutions as they are in training, which is how these models are
        fine-tuned."""
        for module in self.modules():
            if isinstance(module, HydraWaveformEmbeddings):
                module.feature_extractor._freeze_parameters()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if hasattr(module, "masked_spec_embed"):
            init.uniform_(module.masked_spec_embed)
        if getattr(module, "reads_all_layers", False):
            init.constant_(module.layer_weights, 1 / module.layer_weights.shape[1])


class HydraWaveformEncoderMixin(HydraAudioEncoderMixin):
    """A fused encoder of raw audio, without a head: `HydraModelOutput`; pooled is the mean of the
    frames that are not padding."""

    # The backbone's classes of the convolutions, of the map behind them, and of the positions.
    parts: tuple[type[nn.Module], ...]
    # Of what positions add to the scores, where they add anything.
    position_bias_class: type[nn.Module] | None = None
    layer_class = HydraLayerWithDrop

    def embeddings_class(self, config: PreTrainedConfig) -> HydraWaveformEmbeddings:
        return HydraWaveformEmbeddings(config, self.parts, self.backbone_classes[0])

    def add_positions(self, config: PreTrainedConfig) -> None:
        self.last_norm = None
        if config.do_stable_layer_norm:
            self.last_norm = "final_norm"
        if self.position_bias_class is not None:
            self.relative_attention_bias = shared_or_per_member(
                config, "embeddings", lambda: self.position_bias_class(config)
            )

    def get_input_embeddings(self) -> nn.Module:
        """Return the convolutions; those of the first member where members do not share them."""
        return self.first_embeddings().feature_extractor

    def embed_inputs(self, input_values: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None):
        frames = frames_of(input_values.shape[1], self.config)
        if frames < 1:
            raise ValueError(
                f"input_values has {input_values.shape[1]} samples, too few for one frame: pass longer audio, or pad "
                "it with zeros"
            )
        frame_mask = None
        if attention_mask is not None:
            frame_mask = self.frame_mask(attention_mask, frames)
        # Of a convolution: quantised linear maps have no tensor of weights.
        input_values = input_values.to(self.get_input_embeddings().conv_layers[0].conv.weight.dtype)
        states, mask, _ = super().embed_inputs(frame_mask, input_values=input_values, frame_mask=frame_mask)
        layer_kwargs = {}
        if self.position_bias_class is not None:
            layer_kwargs["positions"] = (self.relative_attention_bias(states),)
        return states, mask, layer_kwargs

    def frame_mask(self, attention_mask: torch.Tensor, frames: int) -> torch.Tensor:
        """Which frames are not padding, which follows the samples: (batch, samples) -> (batch,
        frames)"""
        if attention_mask.dim() != 2:
            raise ValueError(f"attention_mask has shape {tuple(attention_mask.shape)}: pass one of (batch, samples)")
        # A sound too short for a frame has the first one.
        lengths = frames_of(attention_mask.sum(dim=1), self.config).clamp(min=1)
        return torch.arange(frames, device=attention_mask.device) < lengths.unsqueeze(1)

    def pool(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs
    ) -> torch.Tensor | None:
        if attention_mask is None:
            return hidden_states.mean(dim=2)
        mask = self.frame_mask(attention_mask, hidden_states.shape[2]).to(hidden_states.device).unsqueeze(-1)
        return hidden_states.masked_fill(~mask, 0).sum(dim=2) / mask.sum(dim=1)


class HydraWaveformClassifierMixin(HydraAudioClassifierMixin):
    """A map, the mean over frames and a second map per member. A map and a mean can change places,
    so the mean comes first."""

    reads_first_token = False
    per_member_parameters = ("layer_weights",)

    def add_head(self, config: PreTrainedConfig) -> None:
        members = config.num_members
        self.reads_all_layers = config.use_weighted_layer_sum
        if self.reads_all_layers:
            self.unused_prefixes = (f"{self.base_model_prefix}.final_norm.",)
            count = config.num_hidden_layers + 1  # the embeddings, and each layer
            self.layer_weights = nn.Parameter(torch.full((members, count), 1 / count))
        self.projector = GroupedLinear(config.hidden_size, [config.classifier_proj_size] * members)
        self.classifier = GroupedLinear(config.classifier_proj_size, [config.num_labels] * members)

    def weighted_sum(self, hidden_states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what heads read in place of the last layer's states, by the softmax of
        `layer_weights`: one (members or 1, batch, tokens, hidden) for the embeddings and for each
        layer -> (members, batch, tokens, hidden)"""
        weights = self.layer_weights.softmax(dim=-1).unbind(dim=1)  # (members,) each
        return sum(states * weight.view(-1, 1, 1, 1) for states, weight in zip(hidden_states, weights, strict=True))

    def encode_all_layers(self, **kwargs) -> HydraModelOutput:
        """Return the encoder's outputs with the weighted sum of all states in place of the last
        ones."""
        output_hidden_states = kwargs.get("output_hidden_states")
        outputs = self.base_model(**kwargs | {"output_hidden_states": True})
        hidden_states = self.weighted_sum([states.transpose(0, 1) for states in outputs.hidden_states])
        pooled = self.base_model.pool(hidden_states, attention_mask=kwargs.get("attention_mask"))
        outputs.member_last_hidden_state = hidden_states.transpose(0, 1)
        outputs.member_pooler_output = pooled.transpose(0, 1)
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if not output_hidden_states:
            outputs.hidden_states = None
        return outputs

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.projector(pooled)


class HydraWav2Vec2PreTrainedModel(HydraWaveformMixin, HydraModelMixin, Wav2Vec2PreTrainedModel):
    config_class = HydraWav2Vec2Config
    base_model_prefix = "wav2vec2"
    architecture = "Wav2Vec2"


class HydraWav2Vec2Model(HydraWaveformEncoderMixin, HydraWav2Vec2PreTrainedModel):
    parts = (Wav2Vec2FeatureEncoder, Wav2Vec2FeatureProjection, Wav2Vec2PositionalConvEmbedding)


class HydraWav2Vec2ForSequenceClassification(HydraWaveformClassifierMixin, HydraWav2Vec2PreTrainedModel):
    encoder_class = HydraWav2Vec2Model


class HydraHubertPreTrainedModel(HydraWaveformMixin, HydraModelMixin, HubertPreTrainedModel):
    config_class = HydraHubertConfig
    base_model_prefix = "hubert"
    architecture = "HuBERT"


class HydraHubertModel(HydraWaveformEncoderMixin, HydraHubertPreTrainedModel):
    parts = (HubertFeatureEncoder, HubertFeatureProjection, HubertPositionalConvEmbedding)


class HydraHubertForSequenceClassification(HydraWaveformClassifierMixin, HydraHubertPreTrainedModel):
    encoder_class = HydraHubertModel


class HydraWavLMPreTrainedModel(HydraWaveformMixin, HydraModelMixin, WavLMPreTrainedModel):
    config_class = HydraWavLMConfig
    base_model_prefix = "wavlm"
    architecture = "WavLM"
    _supports_sdpa = True
    supports_lora_on_qkvo = False


class BiasGate(Grouped):
    """How much each head of each token adds of the bias of positions; weight (sum of heads, 1).

    maps: of each member, from a head's part of the states to eight numbers
    """

    def __init__(self, config: HydraWavLMConfig, layer: int, heads: Sequence[int], head_dim: int):
        super().__init__(heads, 1, None)
        self.maps = shared_or_per_member(config, "attention", partial(nn.Linear, head_dim, 8), layer)

    def forward(self, hidden_states: torch.Tensor, kept_heads: list[list[int]]) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (batch, heads of all members, tokens, 1)"""
        maps = self.maps
        if not isinstance(maps, PerMember):
            maps = [maps]
        states = hidden_states.expand(len(maps), *hidden_states.shape[1:])
        states = states.unflatten(-1, (-1, maps[0].in_features))  # (members, batch, tokens, heads, head_dim)
        gates = []
        for map_of_member, states_of_member, heads in zip(maps, states, kept_heads, strict=True):
            if heads:
                mapped = map_of_member(states_of_member[..., heads, :]).unflatten(-1, (2, 4))
                gates.append(mapped.sum(dim=-1).sigmoid())
        first, second = torch.cat(gates, dim=2).transpose(1, 2).chunk(2, dim=-1)
        return first * (second * self.weight.unsqueeze(1) - 1) + 2


class HydraWavLMAttention(HydraTableBiasAttention):
    """Each head weighs the bias of positions by its own part of the states that the attention
    reads."""

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


class WavLMPositionBias(PositionBias):
    """What positions add to the scores of each of the backbone's heads; weight (buckets of
    distances, heads)."""

    _relative_positions_bucket = WavLMAttention._relative_positions_bucket

    def __init__(self, config: HydraWavLMConfig):
        super().__init__(config.num_buckets, config.num_attention_heads)
        self.num_buckets = config.num_buckets
        self.max_distance = config.max_bucket_distance

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """For states (members or 1, batch, frames, hidden): (heads, frames, frames)"""
        positions = torch.arange(states.shape[2], device=states.device)
        distances = positions[None, :] - positions[:, None]
        return super().forward(self._relative_positions_bucket(distances))


class HydraWavLMModel(HydraWaveformEncoderMixin, HydraWavLMPreTrainedModel):
    parts = (WavLMFeatureEncoder, WavLMFeatureProjection, WavLMPositionalConvEmbedding)
    position_bias_class = WavLMPositionBias
    attention_class = HydraWavLMAttention


class HydraWavLMForSequenceClassification(HydraWaveformClassifierMixin, HydraWavLMPreTrainedModel):
    encoder_class = HydraWavLMModel


class FixedPositions(nn.Embedding):
    """Waves of different lengths, which are not trained."""


class HydraWhisperEmbeddings(nn.Module):
    """From spectrograms to the states that enter the first layer: two convolutions, and positions
    that are not trained."""

    def __init__(self, config: HydraWhisperConfig):
        super().__init__()
        hidden = config.hidden_size
        self.conv1 = nn.Conv1d(config.num_mel_bins, hidden, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, kernel_size=3, stride=2, padding=1)
        self.embed_positions = FixedPositions(config.max_source_positions, hidden).requires_grad_(False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        """(batch, mel bins, frames) -> (batch, frames / 2, hidden), in training with dropout per
        member a leading axis of members"""
        states = nn.functional.gelu(self.conv1(input_features))
        states = nn.functional.gelu(self.conv2(states)).transpose(1, 2)
        return self.dropout(states + self.embed_positions.weight)


class HydraWhisperPreTrainedModel(HydraModelMixin, WhisperPreTrainedModel):
    config_class = HydraWhisperConfig
    base_model_prefix = "encoder"
    architecture = "Whisper encoder"
    input_modalities = ("audio",)
    _no_split_modules = ["HydraWhisperEmbeddings", "HydraLayerWithDrop"]

    def initial_std(self, module: Grouped) -> float:
        return self.config.init_std

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, FixedPositions):
            init.copy_(module.weight, sinusoids(*module.weight.shape))
        if getattr(module, "reads_all_layers", False):
            init.constant_(module.layer_weights, 1 / module.layer_weights.shape[1])


class HydraWhisperModel(HydraEncoderMixin, HydraWhisperPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`; pooled is the mean of the frames."""

    backbone_classes = (WhisperEncoder,)
    last_norm = "layer_norm"
    last_hidden_state_is_normed = True
    embeddings_class = HydraWhisperEmbeddings
    layer_class = HydraLayerWithDrop

    def get_input_embeddings(self) -> nn.Module:
        """Return the first convolution; that of the first member where members do not share it."""
        return self.first_embeddings().conv1

    def embed_inputs(self, input_features: torch.Tensor | None = None):
        bins = self.config.num_mel_bins
        frames = 2 * self.config.max_source_positions
        if input_features.shape[1:] != (bins, frames):
            raise ValueError(
                f"input_features has the shape {tuple(input_features.shape)}, the model reads {bins} mel bins of "
                f"{frames} frames: pass what its feature extractor makes, with feature_size={bins} and "
                "padding='max_length'"
            )
        input_features = input_features.to(self.get_input_embeddings().weight.dtype)
        return super().embed_inputs(input_features=input_features)

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return hidden_states.mean(dim=2)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self, input_features: torch.Tensor | None = None, attention_mask: torch.Tensor | None = None, **kwargs
    ) -> HydraModelOutput:
        """
        input_features: (batch, mel bins, frames)
        attention_mask: not read, as in Whisper itself, which reads silence
        kwargs: of `encode`, too
        """
        kwargs.pop("use_cache", None)  # of Whisper's decoder; checkpointed layers would warn of it
        return self.encode({"input_features": input_features}, **kwargs)


class HydraWhisperForAudioClassification(HydraWaveformClassifierMixin, HydraWhisperPreTrainedModel):
    encoder_class = HydraWhisperModel

    @can_return_tuple
    def forward(
        self,
        input_features: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        input_features: (batch, mel bins, frames)
        labels: (batch,) class indices, or what the task's loss takes
        attention_mask: not read, as in Whisper itself
        """
        return self.encode_and_classify({"input_features": input_features}, labels, **kwargs)
