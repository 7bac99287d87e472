"""HydraElectra configuration."""

from huggingface_hub.dataclasses import strict
from transformers import ElectraConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec
from .configuration_hydra_bert import bert_layer_spec


@strict
class HydraElectraConfig(HydraConfigMixin, ElectraConfig):
    r"""
    An [`ElectraConfig`] with the fields of every Hydra config ([`HydraConfigMixin`]: `kept_heads`, `shared`,
    `ensemble_loss`, `fast_inference`).
    """

    model_type = "hydra_electra"

    auto_classes = {
        "AutoConfig": "configuration_hydra_electra.HydraElectraConfig",
        "AutoModel": "modeling_hydra_electra.HydraElectraModel",
        "AutoModelForSequenceClassification": "modeling_hydra_electra.HydraElectraForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hydra_electra.HydraElectraForTokenClassification",
    }

    @property
    def layer_spec(self) -> LayerSpec:
        return bert_layer_spec(self)


__all__ = ["HydraElectraConfig"]
