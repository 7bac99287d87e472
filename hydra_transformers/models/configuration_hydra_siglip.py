"""HydraSiglip configuration: two towers, each with its fused-attention part."""

from huggingface_hub.dataclasses import strict
from transformers import SiglipConfig, SiglipTextConfig, SiglipVisionConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_towers import HydraTowersConfigMixin, tower_layer_spec, tower_specs


@strict
class HydraSiglipTextConfig(HydraConfigMixin, SiglipTextConfig):
    r"""
    A [`SiglipTextConfig`] with `kept_heads[layer][member]` and `shared`, as in [`HydraSiglipConfig`].
    """

    model_type = "hydra_siglip_text_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_siglip.HydraSiglipTextConfig",
        "AutoModel": "modeling_hydra_siglip.HydraSiglipTextModel",
    }
    base_config_key = "text_config"

    @property
    def layer_spec(self) -> LayerSpec:
        return tower_layer_spec(self)


@strict
class HydraSiglipVisionConfig(HydraConfigMixin, SiglipVisionConfig):
    r"""
    A [`SiglipVisionConfig`] with the fields of [`HydraConfigMixin`]: of a vision tower, and of the image classifier that is one with a head.

    Args:
        vision_use_head (`bool`, *optional*, defaults to `True`):
            Whether the tower pools its last states by attention. An image classifier reads them as they are.
    """

    model_type = "hydra_siglip_vision_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_siglip.HydraSiglipVisionConfig",
        "AutoModel": "modeling_hydra_siglip.HydraSiglipVisionModel",
        "AutoModelForImageClassification": "modeling_hydra_siglip.HydraSiglipForImageClassification",
    }
    base_config_key = "vision_config"

    vision_use_head: bool = True

    @property
    def layer_spec(self) -> LayerSpec:
        return tower_layer_spec(self)


@strict
class HydraSiglipConfig(HydraTowersConfigMixin, SiglipConfig):
    r"""
    A [`SiglipConfig`] whose towers carry the fused-attention part ([`HydraTowersConfigMixin`]: `text_config`,
    `vision_config`, `ensemble_loss`, `fast_inference`).
    """

    model_type = "hydra_siglip"
    keys_to_ignore_at_inference = ["member_logits", "similarity", "text_model_output", "vision_model_output"]
    towers = {"text_config": HydraSiglipTextConfig, "vision_config": HydraSiglipVisionConfig}
    sub_configs_defaults = tower_specs(SiglipConfig, towers)
    sub_configs = towers.copy()  # the name that transformers < 5.19 reads

    # The class first: validation prints the value for every type before the right one, and printing a config is slow.
    text_config: HydraSiglipTextConfig | dict | None = None
    vision_config: HydraSiglipVisionConfig | dict | None = None

    auto_classes = {
        "AutoConfig": "configuration_hydra_siglip.HydraSiglipConfig",
        "AutoModel": "modeling_hydra_siglip.HydraSiglipModel",
        "AutoModelForZeroShotImageClassification": "modeling_hydra_siglip.HydraSiglipModel",
    }


__all__ = ["HydraSiglipConfig", "HydraSiglipTextConfig", "HydraSiglipVisionConfig"]
