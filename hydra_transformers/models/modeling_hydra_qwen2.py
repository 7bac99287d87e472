"""HydraQwen2: M head-pruned Qwen2 classifiers of texts as one network."""

from transformers import Qwen2ForSequenceClassification, Qwen2ForTokenClassification, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2PreTrainedModel

from .configuration_hydra_qwen2 import HydraQwen2Config
from .decoders import DECODER_RULES, HydraDecoderClassifierMixin, HydraDecoderMixin
from .pretrained import HydraModelMixin
from .texts import HydraTextClassifierMixin
from .tokens import HydraTokenClassifierMixin


class HydraQwen2PreTrainedModel(HydraModelMixin, Qwen2PreTrainedModel):
    config_class = HydraQwen2Config
    config: HydraQwen2Config
    base_model_prefix = "model"
    architecture = "Qwen2"
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraLayer"]
    backbone_types = ("qwen2",)
    backbone_rules = DECODER_RULES


class HydraQwen2Model(HydraDecoderMixin, HydraQwen2PreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (Qwen2Model,)


class HydraQwen2ForSequenceClassification(HydraDecoderClassifierMixin, HydraQwen2PreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Qwen2ForSequenceClassification,)
    encoder_class = HydraQwen2Model


class HydraQwen2ForTokenClassification(HydraTokenClassifierMixin, HydraTextClassifierMixin, HydraQwen2PreTrainedModel):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Qwen2ForTokenClassification,)
    encoder_class = HydraQwen2Model


__all__ = [
    "HydraQwen2ForSequenceClassification",
    "HydraQwen2ForTokenClassification",
    "HydraQwen2Model",
    "HydraQwen2PreTrainedModel",
]
