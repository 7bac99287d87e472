"""HydraDINOv3ViT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DINOv3ViTConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec, class_paths


@strict
class HydraDINOv3ViTConfig(HydraConfigMixin, DINOv3ViTConfig):
    r"""A [`DINOv3ViTConfig`] with the fields of [`HydraConfigMixin`].

    Args:
        query_bias, value_bias (`bool`, *optional*, defaults to `True`):
            As in DINOv3; a Hydra has both or neither.
        key_bias (`bool`, *optional*):
            Always as `query_bias`. Where the backbone's keys have no bias, it is zero at first. Training may change it, and
            positions turn it, so that `to_transformers` gives a model with it.
    """

    model_type = "hydra_dinov3_vit"
    auto_classes = class_paths("dinov3_vit", "HydraDINOv3ViT")

    def __post_init__(self, **kwargs):
        if self.query_bias != self.value_bias:
            raise ValueError(
                f"query_bias is {self.query_bias} and value_bias {self.value_bias}: a Hydra's queries, keys and values are one "
                "map, set both alike"
            )
        self.key_bias = self.query_bias
        super().__post_init__(**kwargs)

    @property
    def layer_spec(self) -> LayerSpec:
        return self.make_layer_spec(
            gated_mlp=self.use_gated_mlp,
            mlp_bias=self.mlp_bias,
            qkv_bias=self.query_bias,
            output_bias=self.proj_bias,
            float32_softmax=False,
            attention_dropout=self.attention_dropout,
            drop_path=self.drop_path_rate,
        )
