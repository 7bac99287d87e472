"""HydraGemma: M head-pruned Gemma classifiers of texts as one network."""

from transformers import GemmaForSequenceClassification, GemmaForTokenClassification, GemmaModel
from transformers.models.gemma.modeling_gemma import GemmaPreTrainedModel

from .configuration_hydra_gemma import HydraGemmaConfig
from .decoders import (
    DECODER_RULES,
    HydraDecoderClassifierMixin,
    HydraDecoderMixin,
    HydraOffsetRMSNorm,
    HydraScaledEmbedding,
)
from .pretrained import HydraModelMixin
from .texts import HydraTextClassifierMixin
from .tokens import HydraTokenClassifierMixin


class HydraGemmaPreTrainedModel(HydraModelMixin, GemmaPreTrainedModel):
    config_class = HydraGemmaConfig
    config: HydraGemmaConfig
    base_model_prefix = "model"
    architecture = "Gemma"
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraLayer"]
    backbone_types = ("gemma",)
    backbone_rules = DECODER_RULES


class HydraGemmaModel(HydraDecoderMixin, HydraGemmaPreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (GemmaModel,)
    embedding_class = HydraScaledEmbedding
    norm_class = HydraOffsetRMSNorm


class HydraGemmaForSequenceClassification(HydraDecoderClassifierMixin, HydraGemmaPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (GemmaForSequenceClassification,)
    encoder_class = HydraGemmaModel


class HydraGemmaForTokenClassification(HydraTokenClassifierMixin, HydraTextClassifierMixin, HydraGemmaPreTrainedModel):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (GemmaForTokenClassification,)
    encoder_class = HydraGemmaModel


__all__ = [
    "HydraGemmaForSequenceClassification",
    "HydraGemmaForTokenClassification",
    "HydraGemmaModel",
    "HydraGemmaPreTrainedModel",
]
