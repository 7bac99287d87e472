"""HydraQwen2 configuration."""

from huggingface_hub.dataclasses import strict
from transformers import Qwen2Config

from .configuration_hydra import Anatomy
from .configuration_hydra_llama import HydraDecoderConfigMixin, decoder_anatomy


@strict
class HydraQwen2Config(HydraDecoderConfigMixin, Qwen2Config):
    r"""
    A [`Qwen2Config`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`). Heads are query heads.
    """

    model_type = "hydra_qwen2"

    auto_classes = {
        "AutoConfig": "configuration_hydra_qwen2.HydraQwen2Config",
        "AutoModel": "modeling_hydra_qwen2.HydraQwen2Model",
        "AutoModelForSequenceClassification": "modeling_hydra_qwen2.HydraQwen2ForSequenceClassification",
    }

    @property
    def anatomy(self) -> Anatomy:
        return decoder_anatomy(self, qkv_bias=True)


__all__ = ["HydraQwen2Config"]
