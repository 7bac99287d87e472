"""HydraCLIP configuration: two towers, each with its fused-attention part."""

from huggingface_hub.dataclasses import strict
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_towers import HydraTowersConfigMixin, tower_layer_spec, tower_specs


@strict
class HydraCLIPTextConfig(HydraConfigMixin, CLIPTextConfig):
    r"""
    A [`CLIPTextConfig`] with `kept_heads[layer][member]` and `shared`, as in [`HydraCLIPConfig`].
    """

    model_type = "hydra_clip_text_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_clip.HydraCLIPTextConfig",
        "AutoModel": "modeling_hydra_clip.HydraCLIPTextModel",
    }
    base_config_key = "text_config"

    @property
    def layer_spec(self) -> LayerSpec:
        return tower_layer_spec(self)


@strict
class HydraCLIPVisionConfig(HydraConfigMixin, CLIPVisionConfig):
    r"""
    A [`CLIPVisionConfig`] with the fields of [`HydraConfigMixin`]: of a vision tower, and of the image classifier that is one with a head.
    """

    model_type = "hydra_clip_vision_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_clip.HydraCLIPVisionConfig",
        "AutoModel": "modeling_hydra_clip.HydraCLIPVisionModel",
        "AutoModelForImageClassification": "modeling_hydra_clip.HydraCLIPForImageClassification",
    }
    base_config_key = "vision_config"

    @property
    def layer_spec(self) -> LayerSpec:
        return tower_layer_spec(self)


@strict
class HydraCLIPConfig(HydraTowersConfigMixin, CLIPConfig):
    r"""
    A [`CLIPConfig`] whose towers carry the fused-attention part ([`HydraTowersConfigMixin`]: `text_config`,
    `vision_config`, `ensemble_loss`, `fast_inference`).
    """

    model_type = "hydra_clip"
    keys_to_ignore_at_inference = ["member_logits", "similarity", "text_model_output", "vision_model_output"]
    towers = {"text_config": HydraCLIPTextConfig, "vision_config": HydraCLIPVisionConfig}
    sub_configs_defaults = tower_specs(CLIPConfig, towers)
    sub_configs = towers.copy()  # the name that transformers < 5.19 reads

    # The class first: validation prints the value for every type before the right one, and printing a config is slow.
    text_config: HydraCLIPTextConfig | dict | None = None
    vision_config: HydraCLIPVisionConfig | dict | None = None

    auto_classes = {
        "AutoConfig": "configuration_hydra_clip.HydraCLIPConfig",
        "AutoModel": "modeling_hydra_clip.HydraCLIPModel",
        "AutoModelForZeroShotImageClassification": "modeling_hydra_clip.HydraCLIPModel",
    }


__all__ = ["HydraCLIPConfig", "HydraCLIPTextConfig", "HydraCLIPVisionConfig"]
