"""HydraHubert configuration."""

from huggingface_hub.dataclasses import strict
from transformers import HubertConfig

from .configuration_hydra_wav2vec2 import HydraWaveformConfigMixin


@strict
class HydraHubertConfig(HydraWaveformConfigMixin, HubertConfig):
    r"""A [`HubertConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_hubert"

    auto_classes = {
        "AutoConfig": "configuration_hydra_hubert.HydraHubertConfig",
        "AutoModel": "modeling_hydra_hubert.HydraHubertModel",
        "AutoModelForAudioClassification": "modeling_hydra_hubert.HydraHubertForSequenceClassification",
    }


__all__ = ["HydraHubertConfig"]
