"""HydraDINOv3ViT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DINOv3ViTConfig

from .configuration_hydra import HydraConfigMixin, LayerScaleConfigMixin, LayerSpec


@strict
class HydraDINOv3ViTConfig(LayerScaleConfigMixin, HydraConfigMixin, DINOv3ViTConfig):
    r"""A [`DINOv3ViTConfig`] with the fields of [`HydraConfigMixin`] and [`LayerScaleConfigMixin`].

    Args:
        query_bias, value_bias (`bool`, *optional*, defaults to `True`):
            As in DINOv3; a Hydra has both or neither.
        key_bias (`bool`, *optional*):
            As in DINOv3. Without one, the rows of the keys in the packed bias are zero, and are not
            trained: positions turn keys, so that their bias would change what the model computes.
    """

    model_type = "hydra_dinov3_vit"
    auto_classes = {
        "AutoConfig": "configuration_hydra_dinov3_vit.HydraDINOv3ViTConfig",
        "AutoModel": "modeling_hydra_dinov3_vit.HydraDINOv3ViTModel",
    }

    def __post_init__(self, **kwargs):
        if self.query_bias != self.value_bias:
            raise ValueError(
                f"query_bias is {self.query_bias} and value_bias {self.value_bias}: a Hydra's queries, keys and "
                "values are one map, set both alike"
            )
        if self.key_bias and not self.query_bias:
            raise ValueError(
                "key_bias is True and query_bias False: a Hydra's keys have a bias where its queries have one"
            )
        super().__post_init__(**kwargs)

    @property
    def layer_spec(self) -> LayerSpec:
        layer_scale = None
        if self.layer_scale:
            layer_scale = self.layerscale_value
        return self.make_layer_spec(
            gated_mlp=self.use_gated_mlp,
            mlp_bias=self.mlp_bias,
            qkv_bias=self.query_bias,
            trains_key_bias=self.key_bias or not self.query_bias,
            output_bias=self.proj_bias,
            float32_softmax=False,
            attention_dropout=self.attention_dropout,
            drop_path=self.drop_path_rate,
            layer_scale=layer_scale,
        )
