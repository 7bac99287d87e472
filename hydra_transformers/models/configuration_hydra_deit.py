"""HydraDeiT configuration."""

from huggingface_hub.dataclasses import strict
from transformers import DeiTConfig

from .configuration_hydra import OUTPUTS_OF_HYDRAS, Anatomy, HydraConfigMixin


@strict
class HydraDeiTConfig(HydraConfigMixin, DeiTConfig):
    r"""
    A [`DeiTConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`).

    Args:
        add_pooling_layer (`bool`, *optional*, defaults to `True`):
            Whether [`HydraDeiTModel`] has a pooler. The image classifier has none, as in DeiT.
    """

    model_type = "hydra_deit"
    keys_to_ignore_at_inference = list(OUTPUTS_OF_HYDRAS)

    add_pooling_layer: bool = True

    auto_classes = {
        "AutoConfig": "configuration_hydra_deit.HydraDeiTConfig",
        "AutoModel": "modeling_hydra_deit.HydraDeiTModel",
        "AutoModelForImageClassification": "modeling_hydra_deit.HydraDeiTForImageClassification",
    }

    @property
    def anatomy(self) -> Anatomy:
        return Anatomy(
            inner_size=self.intermediate_size,
            activation=self.hidden_act,
            norm_eps=self.layer_norm_eps,
            qkv_bias=self.qkv_bias,
            dropout=self.hidden_dropout_prob,
            attention_dropout=self.attention_probs_dropout_prob,
        )


__all__ = ["HydraDeiTConfig"]
