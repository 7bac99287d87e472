"""HydraElectra configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ElectraConfig

from .configuration_hydra import OUTPUTS_OF_HYDRAS, Anatomy, HydraConfigMixin


@strict
class HydraElectraConfig(HydraConfigMixin, ElectraConfig):
    r"""
    An [`ElectraConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`,
    `ensemble_loss`, `fast_inference`).
    """

    model_type = "hydra_electra"
    keys_to_ignore_at_inference = list(OUTPUTS_OF_HYDRAS)

    auto_classes = {
        "AutoConfig": "configuration_hydra_electra.HydraElectraConfig",
        "AutoModel": "modeling_hydra_electra.HydraElectraModel",
        "AutoModelForSequenceClassification": "modeling_hydra_electra.HydraElectraForSequenceClassification",
    }

    @property
    def anatomy(self) -> Anatomy:
        return Anatomy(
            inner_size=self.intermediate_size,
            activation=self.hidden_act,
            norm_eps=self.layer_norm_eps,
            norm_first=False,
            float32_softmax=False,
            dropout=self.hidden_dropout_prob,
            attention_dropout=self.attention_probs_dropout_prob,
        )


__all__ = ["HydraElectraConfig"]
