"""HydraLlama configuration."""

from huggingface_hub.dataclasses import strict
from transformers import LlamaConfig

from .configuration_decoders import HydraDecoderConfigMixin, decoder_anatomy
from .configuration_hydra import Anatomy


@strict
class HydraLlamaConfig(HydraDecoderConfigMixin, LlamaConfig):
    r"""
    A [`LlamaConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`). Heads are query heads.
    """

    model_type = "hydra_llama"

    auto_classes = {
        "AutoConfig": "configuration_hydra_llama.HydraLlamaConfig",
        "AutoModel": "modeling_hydra_llama.HydraLlamaModel",
        "AutoModelForSequenceClassification": "modeling_hydra_llama.HydraLlamaForSequenceClassification",
    }

    @property
    def anatomy(self) -> Anatomy:
        has_bias = self.attention_bias
        return decoder_anatomy(self, qkv_bias=has_bias, output_bias=has_bias, mlp_bias=self.mlp_bias)


__all__ = ["HydraLlamaConfig"]
