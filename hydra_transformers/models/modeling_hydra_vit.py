"""HydraViT and HydraDeiT: M head-pruned vision transformers as one network.

A DeiT is a ViT with one more token, which its classifier does not read.
"""

from transformers import DeiTForImageClassification, DeiTModel, ViTForImageClassification, ViTModel
from transformers.activations import ACT2FN
from transformers.models.deit.modeling_deit import DeiTEmbeddings, DeiTPreTrainedModel
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTPreTrainedModel

from .configuration_hydra_vit import HydraDeiTConfig, HydraViTConfig
from .images import HydraImageClassifierMixin, HydraImageEncoderMixin, PatchProductMixin
from .modeling_hydra import GroupedPooler, hydra_layers, shared_norm, shared_or_per_member
from .pretrained import HydraModelMixin, Rule, attention_rules


class HydraViTEmbeddings(PatchProductMixin, ViTEmbeddings):
    pass


class HydraViTPreTrainedModel(HydraModelMixin, ViTPreTrainedModel):
    config_class = HydraViTConfig
    base_model_prefix = "vit"
    architecture = "vision transformer (ViT)"
    _no_split_modules = ["HydraViTEmbeddings", "HydraLayer"]
    backbone_types = ("vit",)
    backbone_rules = (
        *attention_rules("layers.*.attention.{}_proj", "qkvo"),
        Rule("layers.*.attention_norm.*", "layers.*.layernorm_before.*"),
        Rule("layers.*.mlp_norm.*", "layers.*.layernorm_after.*"),
    )


class ViTEncoderMixin(HydraImageEncoderMixin):
    """Embeddings, layers, a last LayerNorm and perhaps a pooler: ViT's, and of those that are made like it."""

    embeddings_class: type
    last_norm = "layernorm"

    def __init__(self, config: HydraViTConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: self.embeddings_class(config))
        self.layers = hydra_layers(config)
        self.layernorm = shared_norm(config)
        self.pooler = None
        if config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer:
            activation = ACT2FN[config.pooler_act]
            self.pooler = GroupedPooler(config.hidden_size, config.pooler_output_size, config.num_members, activation)
        self.post_init()


class HydraViTModel(ViTEncoderMixin, HydraViTPreTrainedModel):
    backbone_classes = (ViTModel,)
    embeddings_class = HydraViTEmbeddings


class HydraViTForImageClassification(HydraImageClassifierMixin, HydraViTPreTrainedModel):
    backbone_classes = (ViTForImageClassification,)
    encoder_class = HydraViTModel
    encoder_options = {"add_pooling_layer": False}


class HydraDeiTEmbeddings(PatchProductMixin, DeiTEmbeddings):
    pass


class HydraDeiTPreTrainedModel(HydraModelMixin, DeiTPreTrainedModel):
    config_class = HydraDeiTConfig
    base_model_prefix = "deit"
    architecture = "DeiT"
    _no_split_modules = ["HydraDeiTEmbeddings", "HydraLayer"]
    backbone_types = ("deit",)
    backbone_rules = HydraViTPreTrainedModel.backbone_rules


class HydraDeiTModel(ViTEncoderMixin, HydraDeiTPreTrainedModel):
    backbone_classes = (DeiTModel,)
    embeddings_class = HydraDeiTEmbeddings


class HydraDeiTForImageClassification(HydraImageClassifierMixin, HydraDeiTPreTrainedModel):
    backbone_classes = (DeiTForImageClassification,)
    encoder_class = HydraDeiTModel
    encoder_options = {"add_pooling_layer": False}
