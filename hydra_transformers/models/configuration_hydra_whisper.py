"""HydraWhisper configuration."""

from huggingface_hub.dataclasses import strict
from transformers import WhisperConfig

from .configuration_hydra import HydraConfigMixin, LayerSpec, class_paths


@strict
class HydraWhisperConfig(HydraConfigMixin, WhisperConfig):
    r"""A [`WhisperConfig`], of its encoder, with the fields of [`HydraConfigMixin`]."""

    model_type = "hydra_whisper"
    auto_classes = class_paths("whisper", "HydraWhisper", "ForAudioClassification")

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
