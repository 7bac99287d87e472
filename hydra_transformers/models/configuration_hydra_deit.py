"""HydraDeiT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DeiTConfig

from .configuration_hydra import HydraConfigMixin
from .configuration_hydra_vit import vit_layer_spec


@strict
class HydraDeiTConfig(HydraConfigMixin, DeiTConfig):
    r"""A [`DeiTConfig`] with the fields of [`HydraConfigMixin`], and `add_pooling_layer`."""

    model_type = "hydra_deit"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_deit.HydraDeiTConfig",
        "AutoModel": "modeling_hydra_deit.HydraDeiTModel",
        "AutoModelForImageClassification": "modeling_hydra_deit.HydraDeiTForImageClassification",
    }
    layer_spec = property(vit_layer_spec)
