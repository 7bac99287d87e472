"""HydraViT: M head-pruned vision transformers as one network."""

from transformers.activations import ACT2FN
from transformers.models.vit.modeling_vit import ViTEmbeddings, ViTPreTrainedModel

from .configuration_hydra_vit import HydraViTConfig
from .images import HydraImageClassifierMixin, HydraImageEncoderMixin, PatchProductMixin
from .modeling_hydra import GroupedPooler
from .pretrained import HydraModelMixin


class HydraViTEmbeddings(PatchProductMixin, ViTEmbeddings):
    pass


class HydraViTPreTrainedModel(HydraModelMixin, ViTPreTrainedModel):
    config_class = HydraViTConfig
    base_model_prefix = "vit"
    architecture = "vision transformer (ViT)"
    _no_split_modules = ["HydraViTEmbeddings", "HydraLayer"]


class HydraViTModel(HydraImageEncoderMixin, HydraViTPreTrainedModel):
    embeddings_class = HydraViTEmbeddings
    last_norm = "layernorm"

    def add_pooling(self, config: HydraViTConfig) -> None:
        activation = ACT2FN[config.pooler_act]
        self.pooler = GroupedPooler(config.hidden_size, config.pooler_output_size, config.num_members, activation)


class HydraViTForImageClassification(HydraImageClassifierMixin, HydraViTPreTrainedModel):
    encoder_class = HydraViTModel
    encoder_options = {"add_pooling_layer": False}
