"""HydraAST: M head-pruned audio spectrogram transformers as one network."""

import torch
from torch import nn
from transformers import ASTForAudioClassification, ASTModel
from transformers.models.audio_spectrogram_transformer.modeling_audio_spectrogram_transformer import (
    ASTEmbeddings,
    ASTPreTrainedModel,
)

from .audio import HydraAudioClassifierMixin, HydraAudioEncoderMixin
from .configuration_hydra_ast import HydraASTConfig
from .modeling_hydra import GroupedLinear, hydra_layers, shared_norm, shared_or_per_member
from .pretrained import HydraModelMixin, Rule, attention_rules


class HydraASTPreTrainedModel(HydraModelMixin, ASTPreTrainedModel):
    config_class = HydraASTConfig
    base_model_prefix = "audio_spectrogram_transformer"
    architecture = "audio spectrogram transformer (AST)"
    _no_split_modules = ["ASTEmbeddings", "HydraLayer"]
    backbone_types = ("audio-spectrogram-transformer",)
    backbone_rules = (
        *attention_rules("layers.*.attention.{}_proj", "qkvo"),
        Rule("layers.*.attention_norm.*", "layers.*.layernorm_before.*"),
        Rule("layers.*.mlp_norm.*", "layers.*.layernorm_after.*"),
        Rule("classifier.out_proj.*", "classifier.dense.*"),
    )


class HydraASTModel(HydraAudioEncoderMixin, HydraASTPreTrainedModel):
    backbone_classes = (ASTModel,)
    last_norm = "layernorm"

    def __init__(self, config: HydraASTConfig):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: ASTEmbeddings(config))
        self.layers = hydra_layers(config)
        self.layernorm = shared_norm(config)
        self.post_init()

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return hidden_states[:, :, :2].mean(dim=2)  # of the [CLS] and the distillation token


class NormedHead(nn.Module):
    """A LayerNorm and a map per member: (members, batch, hidden) -> (members, batch, classes)."""

    def __init__(self, config: HydraASTConfig):
        super().__init__()
        # A head belongs to its member as a whole, whatever else members share.
        self.layernorm = shared_or_per_member(
            config, "classifier", lambda: nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        )
        self.out_proj = GroupedLinear(config.hidden_size, [config.head_width] * config.num_members)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.layernorm(features))


class HydraASTForAudioClassification(HydraAudioClassifierMixin, HydraASTPreTrainedModel):
    backbone_classes = (ASTForAudioClassification,)
    reads_first_token = False

    encoder_class = HydraASTModel

    def add_head(self, config: HydraASTConfig) -> None:
        self.dropout, self.classifier = None, NormedHead(config)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier.layernorm(features)
