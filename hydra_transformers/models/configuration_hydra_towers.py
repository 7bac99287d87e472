"""Configurations of HydraCLIP and HydraSiglip: two towers, each with its fused-attention part."""

from dataclasses import dataclass

from huggingface_hub.dataclasses import strict
from transformers import (
    CLIPConfig,
    CLIPTextConfig,
    CLIPVisionConfig,
    PreTrainedConfig,
    SiglipConfig,
    SiglipTextConfig,
    SiglipVisionConfig,
)

from .configuration_hydra import (
    HydraConfigMixin,
    KeptHeads,
    LayerSpec,
    ShippedPipelines,
    check_ensemble_loss,
    check_model_type,
)


@dataclass(kw_only=True, init=False, repr=False, eq=False)
class HydraTowersConfigMixin(ShippedPipelines):
    r"""A family adds `auto_classes`, `towers` with the config classes of its towers by field, and:

    Args:
        text_config (`dict` or the text tower's config, *optional*):
            The text tower. It has as many members as the vision tower, or one that is used with all
            of them.
        vision_config (`dict` or the vision tower's config, *optional*):
            The vision tower. It has as many members as the text tower, or one that is used with all
            of them.
        ensemble_loss (`str`, *optional*, defaults to `"members"`):
            `"members"` for the mean of the members' losses, `"ensemble"` for that of the ensemble.

    Each tower's config has the fields of [`HydraConfigMixin`].
    """

    keys_to_ignore_at_inference = ["member_logits", "similarity", "text_model_output", "vision_model_output"]

    ensemble_loss: str = "members"

    def __post_init__(self, **kwargs):
        self.text_config = _tower_config(self.text_config, self.towers["text_config"])
        self.vision_config = _tower_config(self.vision_config, self.towers["vision_config"])
        # Not the backbone's own: CLIP's turns the towers' configs into plain ones.
        PreTrainedConfig.__post_init__(self, **kwargs)
        vision = self.vision_config.num_members
        text = self.text_config.num_members
        if vision != text and 1 not in (vision, text):
            raise ValueError(
                f"the vision tower has {vision} members and the text tower {text}: give both the same number, or one "
                "of them a single member"
            )
        check_ensemble_loss(self.ensemble_loss)

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        check_model_type(config_dict, cls)
        return super().from_dict(config_dict, **kwargs)

    def to_dict(self) -> dict:
        fields = super().to_dict()
        for tower in ("vision_config", "text_config"):
            fields[tower].pop("custom_pipelines", None)  # of the tower as a model of its own
        return fields

    @property
    def num_members(self) -> int:
        return max(self.vision_config.num_members, self.text_config.num_members)

    @property
    def kept_heads(self) -> dict[str, KeptHeads]:
        """Return `kept_heads["vision"][layer][member]` and `kept_heads["text"][layer][member]`."""
        return {"vision": self.vision_config.kept_heads, "text": self.text_config.kept_heads}

    @property
    def shared(self) -> list[str]:
        return self.vision_config.shared


def tower_specs(backbone: type, towers: dict[str, type]) -> dict[str, object]:
    """Return the towers' config classes as the backbone's class has its own: from transformers 5.19
    on each is in a spec."""
    specs = list(getattr(backbone, "sub_configs_defaults", {}).values())
    if not specs:
        return towers.copy()
    spec_class = type(specs[0])
    return {name: spec_class(config_class=tower) for name, tower in towers.items()}


def _tower_config(config, config_class: type):
    if isinstance(config, dict):
        return config_class(**config)
    if config is None:
        return config_class()
    return config


class HydraTowerConfigMixin(HydraConfigMixin):
    """Of one tower."""

    @property
    def layer_spec(self) -> LayerSpec:
        return self.make_layer_spec(attention_dropout=self.attention_dropout)


@strict
class HydraCLIPTextConfig(HydraTowerConfigMixin, CLIPTextConfig):
    r"""A [`CLIPTextConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_clip_text_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_towers.HydraCLIPTextConfig",
        "AutoModel": "modeling_hydra_towers.HydraCLIPTextModel",
    }
    base_config_key = "text_config"


@strict
class HydraCLIPVisionConfig(HydraTowerConfigMixin, CLIPVisionConfig):
    r"""A [`CLIPVisionConfig`] with the fields of [`HydraConfigMixin`]: of a vision tower, and of
    the classifier that is one with a head."""

    model_type = "hydra_clip_vision_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_towers.HydraCLIPVisionConfig",
        "AutoModel": "modeling_hydra_towers.HydraCLIPVisionModel",
        "AutoModelForImageClassification": "modeling_hydra_towers.HydraCLIPForImageClassification",
    }
    base_config_key = "vision_config"


@strict
class HydraCLIPConfig(HydraTowersConfigMixin, CLIPConfig):
    r"""A [`CLIPConfig`] with the fields of [`HydraTowersConfigMixin`]."""

    model_type = "hydra_clip"
    towers = {"text_config": HydraCLIPTextConfig, "vision_config": HydraCLIPVisionConfig}
    sub_configs_defaults = tower_specs(CLIPConfig, towers)
    sub_configs = towers.copy()  # the name that transformers < 5.19 reads

    # The class first: validation prints the value for every type before the right one, and printing
    # a config is slow.
    text_config: HydraCLIPTextConfig | dict | None = None
    vision_config: HydraCLIPVisionConfig | dict | None = None

    auto_classes = {
        "AutoConfig": "configuration_hydra_towers.HydraCLIPConfig",
        "AutoModel": "modeling_hydra_towers.HydraCLIPModel",
        "AutoModelForZeroShotImageClassification": "modeling_hydra_towers.HydraCLIPModel",
    }


@strict
class HydraSiglipTextConfig(HydraTowerConfigMixin, SiglipTextConfig):
    r"""A [`SiglipTextConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_siglip_text_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_towers.HydraSiglipTextConfig",
        "AutoModel": "modeling_hydra_towers.HydraSiglipTextModel",
    }
    base_config_key = "text_config"


@strict
class HydraSiglipVisionConfig(HydraTowerConfigMixin, SiglipVisionConfig):
    r"""A [`SiglipVisionConfig`] with the fields of [`HydraConfigMixin`]: of a vision tower, and of
    the image classifier that is one with a head.

    Args:
        vision_use_head (`bool`, *optional*, defaults to `True`):
            Whether the tower pools its last states by attention. An image classifier reads them as
            they are.
    """

    model_type = "hydra_siglip_vision_model"
    auto_classes = {
        "AutoConfig": "configuration_hydra_towers.HydraSiglipVisionConfig",
        "AutoModel": "modeling_hydra_towers.HydraSiglipVisionModel",
        "AutoModelForImageClassification": "modeling_hydra_towers.HydraSiglipForImageClassification",
    }
    base_config_key = "vision_config"

    vision_use_head: bool = True


@strict
class HydraSiglipConfig(HydraTowersConfigMixin, SiglipConfig):
    r"""A [`SiglipConfig`] with the fields of [`HydraTowersConfigMixin`]."""

    model_type = "hydra_siglip"
    towers = {"text_config": HydraSiglipTextConfig, "vision_config": HydraSiglipVisionConfig}
    sub_configs_defaults = tower_specs(SiglipConfig, towers)
    sub_configs = towers.copy()  # the name that transformers < 5.19 reads

    # The class first: validation prints the value for every type before the right one, and printing
    # a config is slow.
    text_config: HydraSiglipTextConfig | dict | None = None
    vision_config: HydraSiglipVisionConfig | dict | None = None

    auto_classes = {
        "AutoConfig": "configuration_hydra_towers.HydraSiglipConfig",
        "AutoModel": "modeling_hydra_towers.HydraSiglipModel",
        "AutoModelForZeroShotImageClassification": "modeling_hydra_towers.HydraSiglipModel",
    }
