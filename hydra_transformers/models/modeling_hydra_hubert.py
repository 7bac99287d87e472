"""HydraHubert: M head-pruned HuBERT encoders as one network."""

from transformers import HubertForSequenceClassification, HubertModel
from transformers.models.hubert.modeling_hubert import (
    HubertFeatureEncoder,
    HubertFeatureProjection,
    HubertPositionalConvEmbedding,
    HubertPreTrainedModel,
)

from .configuration_hydra_hubert import HydraHubertConfig
from .pretrained import HydraModelMixin
from .waveforms import (
    WAVEFORM_RULES,
    HydraWaveformClassifierMixin,
    HydraWaveformEncoderMixin,
    HydraWaveformMixin,
)


class HydraHubertPreTrainedModel(HydraWaveformMixin, HydraModelMixin, HubertPreTrainedModel):
    config_class = HydraHubertConfig
    config: HydraHubertConfig
    base_model_prefix = "hubert"
    architecture = "HuBERT"
    _no_split_modules = ["HydraWaveformEmbeddings", "HydraLayerWithDrop"]
    backbone_types = ("hubert",)
    backbone_rules = WAVEFORM_RULES


class HydraHubertModel(HydraWaveformEncoderMixin, HydraHubertPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`; pooled is the mean of the frames that are no padding."""

    backbone_classes = (HubertModel,)
    parts = (HubertFeatureEncoder, HubertFeatureProjection, HubertPositionalConvEmbedding)


class HydraHubertForSequenceClassification(HydraWaveformClassifierMixin, HydraHubertPreTrainedModel):
    """The fused audio classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (HubertForSequenceClassification,)
    encoder_class = HydraHubertModel


__all__ = ["HydraHubertForSequenceClassification", "HydraHubertModel", "HydraHubertPreTrainedModel"]
