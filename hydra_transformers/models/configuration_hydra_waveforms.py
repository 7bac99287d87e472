"""Configurations of HydraWav2Vec2, HydraHubert, HydraWavLM and HydraWhisper."""

from huggingface_hub.dataclasses import strict
from transformers import HubertConfig, Wav2Vec2Config, WavLMConfig, WhisperConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec


class HydraWaveformConfigMixin(HydraConfigMixin):
    """To which a family's adds `auto_classes`."""

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        for field, without in {"add_adapter": False, "adapter_attn_dim": None, "conv_pos_batch_norm": False}.items():
            if getattr(self, field, without) != without:
                raise ValueError(f"{field} is {getattr(self, field)}: a Hydra has no such part, set it to {without}")

    @property
    def layer_spec(self) -> LayerSpec:
        return self.make_layer_spec(
            norm_first=self.do_stable_layer_norm,
            float32_softmax=False,
            attention_dropout=self.attention_dropout,
            output_dropout=self.hidden_dropout,
            mlp_dropout=self.hidden_dropout,
            inner_dropout=self.activation_dropout,
        )


@strict
class HydraWav2Vec2Config(HydraWaveformConfigMixin, Wav2Vec2Config):
    r"""A [`Wav2Vec2Config`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_wav2vec2"
    auto_classes = {
        "AutoConfig": "configuration_hydra_waveforms.HydraWav2Vec2Config",
        "AutoModel": "modeling_hydra_waveforms.HydraWav2Vec2Model",
        "AutoModelForAudioClassification": "modeling_hydra_waveforms.HydraWav2Vec2ForSequenceClassification",
    }


@strict
class HydraHubertConfig(HydraWaveformConfigMixin, HubertConfig):
    r"""A [`HubertConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_hubert"
    auto_classes = {
        "AutoConfig": "configuration_hydra_waveforms.HydraHubertConfig",
        "AutoModel": "modeling_hydra_waveforms.HydraHubertModel",
        "AutoModelForAudioClassification": "modeling_hydra_waveforms.HydraHubertForSequenceClassification",
    }


@strict
class HydraWavLMConfig(HydraWaveformConfigMixin, WavLMConfig):
    r"""A [`WavLMConfig`] with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_wavlm"
    auto_classes = {
        "AutoConfig": "configuration_hydra_waveforms.HydraWavLMConfig",
        "AutoModel": "modeling_hydra_waveforms.HydraWavLMModel",
        "AutoModelForAudioClassification": "modeling_hydra_waveforms.HydraWavLMForSequenceClassification",
    }


@strict
class HydraWhisperConfig(HydraConfigMixin, WhisperConfig):
    r"""A [`WhisperConfig`], of its encoder, with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_whisper"
    auto_classes = {
        "AutoConfig": "configuration_hydra_waveforms.HydraWhisperConfig",
        "AutoModel": "modeling_hydra_waveforms.HydraWhisperModel",
        "AutoModelForAudioClassification": "modeling_hydra_waveforms.HydraWhisperForAudioClassification",
    }

    attribute_map = WhisperConfig.attribute_map | {
        "intermediate_size": "encoder_ffn_dim",
        "layerdrop": "encoder_layerdrop",
    }

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.is_encoder_decoder = False  # there is no decoder

    @property
    def layer_spec(self) -> LayerSpec:
        return LayerSpec(
            inner_size=self.encoder_ffn_dim,
            activation=self.activation_function,
            norm_eps=1e-5,
            float32_softmax=False,
            attention_dropout=self.attention_dropout,
            output_dropout=self.dropout,
            mlp_dropout=self.dropout,
            inner_dropout=self.activation_dropout,
        )
