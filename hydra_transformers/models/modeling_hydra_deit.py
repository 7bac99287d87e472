"""HydraDeiT: M head-pruned DeiTs as one network: a ViT with one more token, which its classifier
does not read."""

from transformers.models.deit.modeling_deit import DeiTEmbeddings, DeiTPreTrainedModel

from .configuration_hydra_deit import HydraDeiTConfig
from .images import HydraImageClassifierMixin, HydraImageEncoderMixin, PatchProductMixin
from .modeling_hydra_vit import HydraViTModel
from .pretrained import HydraModelMixin


class HydraDeiTEmbeddings(PatchProductMixin, DeiTEmbeddings):
    pass


class HydraDeiTPreTrainedModel(HydraModelMixin, DeiTPreTrainedModel):
    config_class = HydraDeiTConfig
    base_model_prefix = "deit"
    architecture = "DeiT"
    _no_split_modules = ["HydraDeiTEmbeddings", "HydraLayer"]


class HydraDeiTModel(HydraImageEncoderMixin, HydraDeiTPreTrainedModel):
    embeddings_class = HydraDeiTEmbeddings
    last_norm = "layernorm"
    add_pooling = HydraViTModel.add_pooling


class HydraDeiTForImageClassification(HydraImageClassifierMixin, HydraDeiTPreTrainedModel):
    encoder_class = HydraDeiTModel
    encoder_options = {"add_pooling_layer": False}
