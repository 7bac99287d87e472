"""HydraGemma configuration."""

from huggingface_hub.dataclasses import strict
from transformers import GemmaConfig

from .configuration_hydra import LayerSpec
from .configuration_hydra_llama import HydraDecoderConfigMixin, decoder_layer_spec


@strict
class HydraGemmaConfig(HydraDecoderConfigMixin, GemmaConfig):
    r"""A [`GemmaConfig`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_gemma"

    auto_classes = {
        "AutoConfig": "configuration_hydra_gemma.HydraGemmaConfig",
        "AutoModel": "modeling_hydra_gemma.HydraGemmaModel",
        "AutoModelForSequenceClassification": "modeling_hydra_gemma.HydraGemmaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_gemma.HydraGemmaForTokenClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        if self.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention is True: a Hydra's tokens read those before them, set it to False"
            )

    @property
    def layer_spec(self) -> LayerSpec:
        has_bias = self.attention_bias
        return decoder_layer_spec(self, qkv_bias=has_bias, output_bias=has_bias)


__all__ = ["HydraGemmaConfig"]
