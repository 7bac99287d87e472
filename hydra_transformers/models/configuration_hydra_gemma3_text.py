"""HydraGemma3Text configuration."""

from huggingface_hub.dataclasses import strict
from transformers import Gemma3TextConfig

from .configuration_hydra import LayerSpec
from .configuration_hydra_llama import HydraDecoderConfigMixin, check_layer_types, decoder_layer_spec


@strict
class HydraGemma3TextConfig(HydraDecoderConfigMixin, Gemma3TextConfig):
    r"""A [`Gemma3TextConfig`] with the fields of [`HydraConfigMixin`]. Heads are query heads."""

    model_type = "hydra_gemma3_text"
    attribute_map = {"hidden_act": "hidden_activation"}

    auto_classes = {
        "AutoConfig": "configuration_hydra_gemma3_text.HydraGemma3TextConfig",
        "AutoModel": "modeling_hydra_gemma3_text.HydraGemma3TextModel",
        "AutoModelForSequenceClassification": "modeling_hydra_gemma3_text.HydraGemma3TextForSequenceClassification",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        check_layer_types(self)
        if self.use_bidirectional_attention:
            raise ValueError(
                "use_bidirectional_attention is True: a Hydra's tokens read those before them, set it to False"
            )
        if self.attn_logit_softcapping is not None:
            raise ValueError(
                f"attn_logit_softcapping is {self.attn_logit_softcapping}: a Hydra's scores are not bounded, set it to None"
            )

    @property
    def attention_window(self) -> int | None:
        return self.sliding_window

    @property
    def layer_spec(self) -> LayerSpec:
        has_bias = self.attention_bias
        return decoder_layer_spec(
            self,
            qkv_bias=has_bias,
            output_bias=has_bias,
            scaling=self.query_pre_attn_scalar**-0.5,
        )


__all__ = ["HydraGemma3TextConfig"]
