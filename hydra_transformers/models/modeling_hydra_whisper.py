"""HydraWhisper: M head-pruned Whisper encoders as one network."""

import torch
from torch import nn
from transformers import initialization as init
from transformers.models.whisper.modeling_whisper import WhisperEncoder, WhisperPreTrainedModel, sinusoids
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .configuration_hydra_whisper import HydraWhisperConfig
from .modeling_hydra import Grouped, HydraClassifierOutput, HydraEncoderMixin, HydraModelOutput
from .modeling_hydra_waveforms import HydraLayerWithDrop, HydraWaveformClassifierMixin
from .pretrained import HydraModelMixin, Rule, attention_rules


class FixedPositions(nn.Embedding):
    """Waves of different lengths, which are not trained."""


class HydraWhisperEmbeddings(nn.Module):
    """From spectrograms to the states that enter the first layer: two convolutions, and positions that are not trained."""

    def __init__(self, config: HydraWhisperConfig):
        super().__init__()
        hidden = config.hidden_size
        self.conv1 = nn.Conv1d(config.num_mel_bins, hidden, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(hidden, hidden, kernel_size=3, stride=2, padding=1)
        self.embed_positions = FixedPositions(config.max_source_positions, hidden).requires_grad_(False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, input_features: torch.Tensor) -> torch.Tensor:
        """(batch, mel bins, frames) -> (batch, frames / 2, hidden), in training with dropout per member a leading axis of members"""
        states = nn.functional.gelu(self.conv1(input_features))
        states = nn.functional.gelu(self.conv2(states)).transpose(1, 2)
        return self.dropout(states + self.embed_positions.weight)


class HydraWhisperPreTrainedModel(HydraModelMixin, WhisperPreTrainedModel):
    config_class = HydraWhisperConfig
    base_model_prefix = "encoder"
    architecture = "Whisper encoder"
    input_modalities = ("audio",)
    _no_split_modules = ["HydraWhisperEmbeddings", "HydraLayerWithDrop"]
    backbone_types = ("whisper",)
    backbone_rules = (
        *attention_rules("layers.*.self_attn.{}_proj", ("q", "k", "v", "out")),
        Rule("layers.*.attention_norm.*", "layers.*.self_attn_layer_norm.*"),
        Rule("layers.*.mlp_norm.*", "layers.*.final_layer_norm.*"),
        Rule("layers.*.mlp.fc1.*", "layers.*.fc1.*"),
        Rule("layers.*.mlp.fc2.*", "layers.*.fc2.*"),
        Rule("embeddings.conv1.*", "conv1.*"),
        Rule("embeddings.conv2.*", "conv2.*"),
        Rule("embeddings.embed_positions.*", "embed_positions.*"),
    )

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
        """The first convolution; that of the first member where members do not share it."""
        return self.first_embeddings().conv1

    def embed_inputs(self, input_features: torch.Tensor | None = None):
        bins, frames = self.config.num_mel_bins, 2 * self.config.max_source_positions
        if input_features.shape[1:] != (bins, frames):
            raise ValueError(
                f"input_features has the shape {tuple(input_features.shape)}, the model reads {bins} mel bins of {frames} frames: "
                f"pass what its feature extractor makes, with feature_size={bins} and padding='max_length'"
            )
        return super().embed_inputs(input_features=input_features.to(self.get_input_embeddings().weight.dtype))

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return hidden_states.mean(dim=2)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_features: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
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
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        attention_mask: not read, as in Whisper itself
        """
        return self.encode_and_classify({"input_features": input_features}, labels, **kwargs)
