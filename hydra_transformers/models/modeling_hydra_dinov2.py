"""HydraDinov2, with registers and without: M head-pruned DINOv2 encoders as one network."""

import torch
from transformers.models.dinov2.modeling_dinov2 import Dinov2Embeddings, Dinov2PreTrainedModel
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersEmbeddings,
    Dinov2WithRegistersPreTrainedModel,
)

from .configuration_hydra_dinov2 import HydraDinov2Config, HydraDinov2WithRegistersConfig
from .images import HydraImageClassifierMixin, HydraImageEncoderMixin, PatchProductMixin
from .pretrained import HydraModelMixin


class HydraDinov2Embeddings(PatchProductMixin, Dinov2Embeddings):
    pass


class HydraDinov2PreTrainedModel(HydraModelMixin, Dinov2PreTrainedModel):
    config_class = HydraDinov2Config
    base_model_prefix = "dinov2"
    architecture = "DINOv2"
    _no_split_modules = ["HydraDinov2Embeddings", "HydraLayer"]


class Dinov2EncoderMixin(HydraImageEncoderMixin):
    """Embeddings, layers and a last LayerNorm; pooled is the [CLS] token's state."""

    last_norm = "layernorm"

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor:
        return hidden_states[:, :, 0]


class Dinov2ClassifierMixin(HydraImageClassifierMixin):
    """A head that reads the [CLS] token and the mean of the patches."""

    reads_first_token = False
    hidden_states_read = 2

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        first_patch = 1 + getattr(self.config, "num_register_tokens", 0)
        return torch.cat([hidden_states[:, :, 0], hidden_states[:, :, first_patch:].mean(dim=2)], dim=-1)


class HydraDinov2Model(Dinov2EncoderMixin, HydraDinov2PreTrainedModel):
    embeddings_class = HydraDinov2Embeddings


class HydraDinov2ForImageClassification(Dinov2ClassifierMixin, HydraDinov2PreTrainedModel):
    encoder_class = HydraDinov2Model


class HydraDinov2WithRegistersEmbeddings(PatchProductMixin, Dinov2WithRegistersEmbeddings):
    pass


class HydraDinov2WithRegistersPreTrainedModel(HydraModelMixin, Dinov2WithRegistersPreTrainedModel):
    config_class = HydraDinov2WithRegistersConfig
    base_model_prefix = "dinov2_with_registers"
    architecture = "DINOv2 with registers"
    _no_split_modules = ["HydraDinov2WithRegistersEmbeddings", "HydraLayer"]


class HydraDinov2WithRegistersModel(Dinov2EncoderMixin, HydraDinov2WithRegistersPreTrainedModel):
    embeddings_class = HydraDinov2WithRegistersEmbeddings


class HydraDinov2WithRegistersForImageClassification(Dinov2ClassifierMixin, HydraDinov2WithRegistersPreTrainedModel):
    encoder_class = HydraDinov2WithRegistersModel
