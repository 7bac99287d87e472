"""HydraAST: M head-pruned audio spectrogram transformers as one network."""

from functools import partial

import torch
from torch import nn
from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import (
    ASTEmbeddings,
    ASTPreTrainedModel,
)

from .audio import HydraAudioClassifierMixin, HydraAudioEncoderMixin
from .configuration_hydra_ast import HydraASTConfig
from .modeling_hydra import GroupedLinear, shared_or_per_member
from .pretrained import HydraModelMixin


class HydraASTPreTrainedModel(HydraModelMixin, ASTPreTrainedModel):
    config_class = HydraASTConfig
    base_model_prefix = "audio_spectrogram_transformer"
    architecture = "audio spectrogram transformer (AST)"
    _no_split_modules = ["ASTEmbeddings", "HydraLayer"]


class HydraASTModel(HydraAudioEncoderMixin, HydraASTPreTrainedModel):
    embeddings_class = ASTEmbeddings
    last_norm = "layernorm"

    def get_input_embeddings(self) -> nn.Module:
        """Return the patch embeddings; those of the first member where members do not share
        them."""
        return self.first_embeddings().patch_embeddings

    def embed_inputs(self, input_values: torch.Tensor, attention_mask: torch.Tensor | None = None):
        frames = self.config.max_length
        mel_bins = self.config.num_mel_bins
        if self._patches(*input_values.shape[1:]) != self._patches(frames, mel_bins):
            raise ValueError(
                f"input_values has {input_values.shape[1]} frames of {input_values.shape[2]} mel bins, the model "
                f"reads {frames} of {mel_bins}: give the feature extractor max_length={frames} and "
                f"num_mel_bins={mel_bins}"
            )
        input_values = input_values.to(self.get_input_embeddings().projection.weight.dtype)
        return super().embed_inputs(attention_mask, input_values=input_values)

    def _patches(self, frames: int, mel_bins: int) -> tuple[int, int]:
        """Return how many patches a spectrogram has along its time and along its frequencies."""
        config = self.config
        along_time = (frames - config.patch_size) // config.time_stride
        along_frequencies = (mel_bins - config.patch_size) // config.frequency_stride
        return along_time, along_frequencies

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return hidden_states[:, :, :2].mean(dim=2)  # of the [CLS] and the distillation token


class NormedHead(nn.Module):
    """A LayerNorm and a map per member."""

    def __init__(self, config: HydraASTConfig):
        super().__init__()
        # A head belongs to its member as a whole, whatever else members share.
        norm = partial(nn.LayerNorm, config.hidden_size, eps=config.layer_norm_eps)
        self.layernorm = shared_or_per_member(config, "classifier", norm)
        self.out_proj = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members)


class HydraASTForAudioClassification(HydraAudioClassifierMixin, HydraASTPreTrainedModel):
    encoder_class = HydraASTModel
    reads_first_token = False
    last_map = "classifier.out_proj"

    def add_head(self, config: HydraASTConfig) -> None:
        self.classifier = NormedHead(config)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor) -> torch.Tensor:
        return self.classifier.layernorm(pooled)
