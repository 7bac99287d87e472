"""HydraWav2Vec2: M head-pruned Wav2Vec2 encoders as one network."""

from transformers import Wav2Vec2ForSequenceClassification, Wav2Vec2Model
from transformers.models.wav2vec2.modeling_wav2vec2 import (
    Wav2Vec2FeatureEncoder,
    Wav2Vec2FeatureProjection,
    Wav2Vec2PositionalConvEmbedding,
    Wav2Vec2PreTrainedModel,
)

from .configuration_hydra_wav2vec2 import HydraWav2Vec2Config
from .pretrained import HydraModelMixin
from .waveforms import (
    WAVEFORM_RULES,
    HydraWaveformClassifierMixin,
    HydraWaveformEncoderMixin,
    HydraWaveformMixin,
)


class HydraWav2Vec2PreTrainedModel(HydraWaveformMixin, HydraModelMixin, Wav2Vec2PreTrainedModel):
    config_class = HydraWav2Vec2Config
    config: HydraWav2Vec2Config
    base_model_prefix = "wav2vec2"
    architecture = "Wav2Vec2"
    _no_split_modules = ["HydraWaveformEmbeddings", "HydraLayerWithDrop"]
    backbone_types = ("wav2vec2",)
    backbone_rules = WAVEFORM_RULES


class HydraWav2Vec2Model(HydraWaveformEncoderMixin, HydraWav2Vec2PreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`; pooled is the mean of the frames that are no padding."""

    backbone_classes = (Wav2Vec2Model,)
    parts = (Wav2Vec2FeatureEncoder, Wav2Vec2FeatureProjection, Wav2Vec2PositionalConvEmbedding)


class HydraWav2Vec2ForSequenceClassification(HydraWaveformClassifierMixin, HydraWav2Vec2PreTrainedModel):
    """The fused audio classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Wav2Vec2ForSequenceClassification,)
    encoder_class = HydraWav2Vec2Model


__all__ = ["HydraWav2Vec2ForSequenceClassification", "HydraWav2Vec2Model", "HydraWav2Vec2PreTrainedModel"]
