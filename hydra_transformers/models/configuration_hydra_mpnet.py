"""HydraMPNet configuration."""

from huggingface_hub.dataclasses import strict
from transformers import MPNetConfig

from .configuration_hydra import HydraConfigMixin, class_paths
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraMPNetConfig(HydraConfigMixin, MPNetConfig):
    r"""An [`MPNetConfig`] with the fields of [`HydraConfigMixin`], and `add_pooling_layer`."""

    model_type = "hydra_mpnet"
    add_pooling_layer: bool = True
    auto_classes = class_paths("mpnet", "HydraMPNet", "ForSequenceClassification", "ForTokenClassification")
    layer_spec = property(bert_layer_spec)
