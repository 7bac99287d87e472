"""HydraQwen2 configuration."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config

from .configuration_hydra import LayerSpec
from .configuration_hydra_llama import HydraDecoderConfigMixin, check_layer_types, decoder_layer_spec


@strict
class HydraQwen2Config(HydraDecoderConfigMixin, Qwen2Config):
    r"""A [`Qwen2Config`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_qwen2"

    auto_classes = {
        "AutoConfig": "configuration_hydra_qwen2.HydraQwen2Config",
        "AutoModel": "modeling_hydra_qwen2.HydraQwen2Model",
        "AutoModelForSequenceClassification": "modeling_hydra_qwen2.HydraQwen2ForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_qwen2.HydraQwen2ForTokenClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_layer_types(self)

    @property
    def attention_window(self) -> int | None:
        return self.sliding_window

    @property
    def layer_spec(self) -> LayerSpec:
        return decoder_layer_spec(self, qkv_bias=True)


__all__ = ["HydraQwen2Config"]
