"""HydraViT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ViTConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec


def vit_layer_spec(config: HydraConfigMixin) -> LayerSpec:
    return config.make_layer_spec(
        head_dim=getattr(config, "head_dim", None),
        qkv_bias=config.qkv_bias,
        attention_dropout=config.attention_probs_dropout_prob,
        output_dropout=config.hidden_dropout_prob,
        mlp_dropout=config.hidden_dropout_prob,
    )


@strict
class HydraViTConfig(HydraConfigMixin, ViTConfig):
    r"""A [`ViTConfig`] with the fields of [`HydraConfigMixin`], and `add_pooling_layer`."""

    model_type = "hydra_vit"
    add_pooling_layer: bool = True
    auto_classes = {
        "AutoConfig": "configuration_hydra_vit.HydraViTConfig",
        "AutoModel": "modeling_hydra_vit.HydraViTModel",
        "AutoModelForImageClassification": "modeling_hydra_vit.HydraViTForImageClassification",
    }
    layer_spec = property(vit_layer_spec)
