"""HydraWavLM configuration."""

from huggingface_hub.dataclasses import strict
from transformers import WavLMConfig

from .configuration_hydra_wav2vec2 import HydraWaveformConfigMixin


@strict
class HydraWavLMConfig(HydraWaveformConfigMixin, WavLMConfig):
    r"""A [`WavLMConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_wavlm"

    auto_classes = {
        "AutoConfig": "configuration_hydra_wavlm.HydraWavLMConfig",
        "AutoModel": "modeling_hydra_wavlm.HydraWavLMModel",
        "AutoModelForAudioClassification": "modeling_hydra_wavlm.HydraWavLMForSequenceClassification",
    }


__all__ = ["HydraWavLMConfig"]
