"""HydraDinov2WithRegisters configuration."""

from huggingface_hub.dataclasses import strict
from transformers import Dinov2WithRegistersConfig

from .configuration_hydra import Anatomy, HydraConfigMixin


@strict
class HydraDinov2WithRegistersConfig(HydraConfigMixin, Dinov2WithRegistersConfig):
    r"""
    A [`Dinov2WithRegistersConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`, `ensemble_loss`,
    `fast_inference`).
    """

    model_type = "hydra_dinov2_with_registers"
    keys_to_ignore_at_inference = ["member_logits"]

    auto_classes = {
        "AutoConfig": "configuration_hydra_dinov2_with_registers.HydraDinov2WithRegistersConfig",
        "AutoModel": "modeling_hydra_dinov2_with_registers.HydraDinov2WithRegistersModel",
        "AutoModelForImageClassification": "modeling_hydra_dinov2_with_registers.HydraDinov2WithRegistersForImageClassification",
    }

    @property
    def anatomy(self) -> Anatomy:
        inner = int(self.hidden_size * self.mlp_ratio)
        if self.use_swiglu_ffn:
            inner = (int(inner * 2 / 3) + 7) // 8 * 8  # two thirds, rounded up to a multiple of eight
        return Anatomy(
            inner_size=inner,
            activation="silu" if self.use_swiglu_ffn else self.hidden_act,
            norm_eps=self.layer_norm_eps,
            gated_mlp=self.use_swiglu_ffn,
            qkv_bias=self.qkv_bias,
            float32_softmax=False,
            attention_dropout=self.attention_probs_dropout_prob,
            drop_path=self.drop_path_rate,
        )


__all__ = ["HydraDinov2WithRegistersConfig"]
