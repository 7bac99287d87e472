"""HydraDeiT: M head-pruned DeiTs as one network. They are ViTs with one more token, which their classifier does not read."""

from transformers import DeiTForImageClassification, DeiTModel
from transformers.models.deit.modeling_deit import DeiTEmbeddings, DeiTPreTrainedModel

from .configuration_hydra_deit import HydraDeiTConfig
from .images import HydraImageClassifierMixin, as_patch_projection
from .modeling_hydra import GroupedLinear
from .modeling_hydra_vit import HydraViTPreTrainedModel, ViTEncoderMixin
from .pretrained import HydraModelMixin


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
    backbone_types = ("deit",)
    backbone_rules = HydraViTPreTrainedModel.backbone_rules


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
        self.classifier = GroupedLinear(config.hidden_size, [config.head_width] * config.num_members)
        self.post_init()


__all__ = ["HydraDeiTForImageClassification", "HydraDeiTModel", "HydraDeiTPreTrainedModel"]
