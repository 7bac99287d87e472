"""Configurations of HydraDinov2, with registers and without."""

from huggingface_hub.dataclasses import strict
from transformers import Dinov2Config, Dinov2WithRegistersConfig, __version__

from .configuration_hydra import HydraConfigMixin, LayerScaleConfigMixin, LayerSpec


def dinov2_layer_spec(config: HydraConfigMixin) -> LayerSpec:
    inner = int(config.hidden_size * config.mlp_ratio)
    activation = config.hidden_act
    if config.use_swiglu_ffn:
        activation = "silu"
        inner = (int(inner * 2 / 3) + 7) // 8 * 8  # two thirds, rounded up to a multiple of eight
    output_dropout = None
    if __version__.startswith("5.17."):  # the backbone drops there in this version of Transformers
        output_dropout = config.hidden_dropout_prob
    layer_scale = None
    if config.layer_scale:
        layer_scale = config.layerscale_value
    return config.make_layer_spec(
        inner_size=inner,
        activation=activation,
        head_dim=getattr(config, "head_dim", None),
        gated_mlp=config.use_swiglu_ffn,
        qkv_bias=config.qkv_bias,
        float32_softmax=False,
        attention_dropout=config.attention_probs_dropout_prob,
        output_dropout=output_dropout,
        drop_path=config.drop_path_rate,
        layer_scale=layer_scale,
    )


@strict
class HydraDinov2Config(LayerScaleConfigMixin, HydraConfigMixin, Dinov2Config):
    r"""A [`Dinov2Config`] with the fields of [`HydraConfigMixin`] and [`LayerScaleConfigMixin`] and
    [`LayerScaleConfigMixin`]."""

    model_type = "hydra_dinov2"
    auto_classes = {
        "AutoConfig": "configuration_hydra_dinov2.HydraDinov2Config",
        "AutoModel": "modeling_hydra_dinov2.HydraDinov2Model",
        "AutoModelForImageClassification": "modeling_hydra_dinov2.HydraDinov2ForImageClassification",
    }
    layer_spec = property(dinov2_layer_spec)


@strict
class HydraDinov2WithRegistersConfig(LayerScaleConfigMixin, HydraConfigMixin, Dinov2WithRegistersConfig):
    r"""A [`Dinov2WithRegistersConfig`] with the fields of [`HydraConfigMixin`] and
    [`LayerScaleConfigMixin`] and [`LayerScaleConfigMixin`]."""

    model_type = "hydra_dinov2_with_registers"
    auto_classes = {
        "AutoConfig": "configuration_hydra_dinov2.HydraDinov2WithRegistersConfig",
        "AutoModel": "modeling_hydra_dinov2.HydraDinov2WithRegistersModel",
        "AutoModelForImageClassification": "modeling_hydra_dinov2.HydraDinov2WithRegistersForImageClassification",
    }
    layer_spec = property(dinov2_layer_spec)
