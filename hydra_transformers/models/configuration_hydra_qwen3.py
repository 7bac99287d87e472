"""HydraQwen3 configuration."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen3Config

from .configuration_hydra import LayerSpec
from .configuration_hydra_llama import HydraDecoderConfigMixin, check_layer_types, decoder_layer_spec


@strict
class HydraQwen3Config(HydraDecoderConfigMixin, Qwen3Config):
    r"""A [`Qwen3Config`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_qwen3"

    auto_classes = {
        "AutoConfig": "configuration_hydra_qwen3.HydraQwen3Config",
        "AutoModel": "modeling_hydra_qwen3.HydraQwen3Model",
        "AutoModelForSequenceClassification": "modeling_hydra_qwen3.HydraQwen3ForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_qwen3.HydraQwen3ForTokenClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_layer_types(self)

    @property
    def attention_window(self) -> int | None:
        return self.sliding_window

    @property
    def layer_spec(self) -> LayerSpec:
        return decoder_layer_spec(self, qkv_bias=self.attention_bias, output_bias=self.attention_bias)


__all__ = ["HydraQwen3Config"]
