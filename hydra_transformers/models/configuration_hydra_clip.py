"""HydraCLIP configuration: two towers, each with its fused-attention part."""

from huggingface_hub.dataclasses import strict
from transformers import CLIPConfig, CLIPTextConfig, CLIPVisionConfig, PreTrainedConfig

from .configuration_hydra import (
    Anatomy,
    HydraConfigMixin,
    KeptHeads,
    ShippedPipelines,
    check_ensemble_loss,
    check_model_type,
    check_num_members,
)


def tower_anatomy(config: CLIPTextConfig | CLIPVisionConfig) -> Anatomy:
    return Anatomy(
        inner_size=config.intermediate_size,
        activation=config.hidden_act,
        norm_eps=config.layer_norm_eps,
        attention_dropout=config.attention_dropout,
    )


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
    def anatomy(self) -> Anatomy:
        return tower_anatomy(self)


@strict
class HydraCLIPVisionConfig(HydraConfigMixin, CLIPVisionConfig):
    r"""
    A [`CLIPVisionConfig`] with `kept_heads[layer][member]` and `shared`, as in [`HydraCLIPConfig`].
    """

    model_type = "hydra_clip_vision_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_clip.HydraCLIPVisionConfig",
        "AutoModel": "modeling_hydra_clip.HydraCLIPVisionModel",
    }
    base_config_key = "vision_config"

    @property
    def anatomy(self) -> Anatomy:
        return tower_anatomy(self)


@strict
class HydraCLIPConfig(ShippedPipelines, CLIPConfig):
    r"""
    A [`CLIPConfig`] whose towers carry the fused-attention part.

    Args:
        text_config (`dict` or [`HydraCLIPTextConfig`], *optional*):
            The text tower. It has as many members as the vision tower, or one that is used with all of them.
        vision_config (`dict` or [`HydraCLIPVisionConfig`], *optional*):
            The vision tower. It has as many members as the text tower, or one that is used with all of them.
        ensemble_loss (`str`, *optional*, defaults to `"members"`):
            `"members"` for the mean of the members' contrastive losses, `"ensemble"` for that of the ensemble.
        fast_inference (`bool`, *optional*, defaults to `True`):
            `False` switches it off in both towers.

    Each tower's config has `kept_heads[layer][member]` (the backbone heads that a member keeps in a layer, ascending)
    and `shared` (the parts that exist once for all members: `["embeddings", "layernorm", "mlp"]` by default).
    """

    model_type = "hydra_clip"
    keys_to_ignore_at_inference = ["member_logits", "similarity", "text_model_output", "vision_model_output"]
    sub_configs_defaults = {"text_config": HydraCLIPTextConfig, "vision_config": HydraCLIPVisionConfig}
    sub_configs = sub_configs_defaults.copy()  # the name that transformers < 5.19 reads

    text_config: dict | HydraCLIPTextConfig | None = None
    vision_config: dict | HydraCLIPVisionConfig | None = None
    ensemble_loss: str = "members"
    fast_inference: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_clip.HydraCLIPConfig",
        "AutoModel": "modeling_hydra_clip.HydraCLIPModel",
        "AutoModelForZeroShotImageClassification": "modeling_hydra_clip.HydraCLIPModel",
    }

    def __post_init__(self, num_members: int | None = None, **kwargs):
        self.text_config = _tower_config(self.text_config, HydraCLIPTextConfig)
        self.vision_config = _tower_config(self.vision_config, HydraCLIPVisionConfig)
        # Not CLIPConfig's own: that one turns the towers' configs into plain CLIP ones.
        PreTrainedConfig.__post_init__(self, **kwargs)
        vision, text = self.vision_config.num_members, self.text_config.num_members
        if vision != text and 1 not in (vision, text):
            raise ValueError(
                f"the vision tower has {vision} members and the text tower {text}: give both the same number, or one "
                "of them a single member"
            )
        check_num_members(num_members, self)
        check_ensemble_loss(self.ensemble_loss)
        if not self.fast_inference:
            self.vision_config.fast_inference = self.text_config.fast_inference = False

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        check_model_type(config_dict, cls)
        return super().from_dict(config_dict, **kwargs)

    @property
    def num_members(self) -> int:
        return max(self.vision_config.num_members, self.text_config.num_members)

    @property
    def kept_heads(self) -> dict[str, KeptHeads]:
        """`kept_heads["vision"][layer][member]` and `kept_heads["text"][layer][member]`"""
        return {"vision": self.vision_config.kept_heads, "text": self.text_config.kept_heads}

    @property
    def shared(self) -> list[str]:
        return self.vision_config.shared


def _tower_config(config, config_class: type):
    if isinstance(config, dict):
        return config_class(**config)
    return config_class() if config is None else config


__all__ = ["HydraCLIPConfig", "HydraCLIPTextConfig", "HydraCLIPVisionConfig"]
