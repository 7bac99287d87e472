"""HydraDeiT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DeiTConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_vit import vit_layer_spec


@strict
class HydraDeiTConfig(HydraConfigMixin, DeiTConfig):
    r"""
    A [`DeiTConfig`] with the fields of [`HydraConfigMixin`].

    Args:
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Whether [`HydraDeiTModel`] has a pooler. The image classifier has none, as in DeiT.
    """

    model_type = "hydra_deit"

    add_pooling_layer: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_deit.HydraDeiTConfig",
        "AutoModel": "modeling_hydra_deit.HydraDeiTModel",
        "AutoModelForImageClassification": "modeling_hydra_deit.HydraDeiTForImageClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return vit_layer_spec(self)


__all__ = ["HydraDeiTConfig"]
