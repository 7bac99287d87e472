"""HydraDeiT: M head-pruned DeiTs as one network. They are ViTs with one more token, which their classifier does not read."""

import torch
from torch import nn
from transformers import DeiTForImageClassification, DeiTModel
from transformers.models.deit.modeling_deit import DeiTEmbeddings, DeiTPreTrainedModel

from .attention import HydraAttention
from .classification import HydraImageClassifierMixin
from .configuration_hydra_deit import HydraDeiTConfig
from .grouped import GroupedLinear, init_grouped
from .modeling_hydra import HydraModelMixin
from .modeling_hydra_vit import HydraViTPreTrainedModel, ViTEncoderMixin
from .patch_embedding import as_patch_projection


class HydraDeiTEmbeddings(DeiTEmbeddings):
    """DeiT's embeddings with the patches embedded by a product."""

    def __init__(self, config: HydraDeiTConfig):
        super().__init__(config)
        self.patch_embeddings.projection = as_patch_projection(self.patch_embeddings.projection)


class HydraDeiTPreTrainedModel(HydraModelMixin, DeiTPreTrainedModel):
    config_class = HydraDeiTConfig
    config: HydraDeiTConfig
    base_model_prefix = "deit"
    architecture = "DeiT"
    _no_split_modules = ["HydraDeiTEmbeddings", "HydraLayer"]
    _can_record_outputs = {"attentions": HydraAttention}
    backbone_types = ("deit",)
    backbone_rules = HydraViTPreTrainedModel.backbone_rules

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        init_grouped(module, std=self.config.initializer_range)


class HydraDeiTModel(ViTEncoderMixin, HydraDeiTPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`."""

    backbone_classes = (DeiTModel,)
    embeddings_class = HydraDeiTEmbeddings


class HydraDeiTForImageClassification(HydraImageClassifierMixin, HydraDeiTPreTrainedModel):
    """The fused image classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (DeiTForImageClassification,)

    def __init__(self, config: HydraDeiTConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.deit = HydraDeiTModel(config, add_pooling_layer=False)
        self.classifier = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members)
        self.post_init()


__all__ = ["HydraDeiTForImageClassification", "HydraDeiTModel", "HydraDeiTPreTrainedModel"]
