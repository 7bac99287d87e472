"""HydraDinov2WithRegisters: M head-pruned DINOv2 encoders with register tokens as one network."""

from transformers import Dinov2WithRegistersForImageClassification, Dinov2WithRegistersModel
from transformers.models.dinov2_with_registers.modeling_dinov2_with_registers import (
    Dinov2WithRegistersEmbeddings,
    Dinov2WithRegistersPreTrainedModel,
)

from .configuration_hydra_dinov2_with_registers import HydraDinov2WithRegistersConfig
from .images import as_patch_projection
from .modeling_hydra import GroupedLinear
from .modeling_hydra_dinov2 import DINOV2_RULES, Dinov2ClassifierMixin, Dinov2EncoderMixin
from .pretrained import HydraModelMixin


class HydraDinov2WithRegistersEmbeddings(Dinov2WithRegistersEmbeddings):
    """DINOv2's embeddings with registers, with the patches embedded by a product."""

    def __init__(self, config: HydraDinov2WithRegistersConfig):
        super().__init__(config)
        self.patch_embeddings.projection = as_patch_projection(self.patch_embeddings.projection)


class HydraDinov2WithRegistersPreTrainedModel(HydraModelMixin, Dinov2WithRegistersPreTrainedModel):
    config_class = HydraDinov2WithRegistersConfig
    config: HydraDinov2WithRegistersConfig
    base_model_prefix = "dinov2_with_registers"
    architecture = "DINOv2 with registers"
    _no_split_modules = ["HydraDinov2WithRegistersEmbeddings", "HydraLayer"]
    backbone_types = ("dinov2_with_registers",)
    backbone_rules = DINOV2_RULES


class HydraDinov2WithRegistersModel(Dinov2EncoderMixin, HydraDinov2WithRegistersPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (Dinov2WithRegistersModel,)
    embeddings_class = HydraDinov2WithRegistersEmbeddings


class HydraDinov2WithRegistersForImageClassification(Dinov2ClassifierMixin, HydraDinov2WithRegistersPreTrainedModel):
    """The fused image classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Dinov2WithRegistersForImageClassification,)

    def __init__(self, config: HydraDinov2WithRegistersConfig):
        super().__init__(config)
        self.num_labels, self.num_register_tokens = config.num_labels, config.num_register_tokens
        self.dinov2_with_registers = HydraDinov2WithRegistersModel(config)
        self.classifier = GroupedLinear(2 * config.hidden_size, [config.head_width] * config.num_members)
        self.post_init()


__all__ = [
    "HydraDinov2WithRegistersForImageClassification",
    "HydraDinov2WithRegistersModel",
    "HydraDinov2WithRegistersPreTrainedModel",
]
