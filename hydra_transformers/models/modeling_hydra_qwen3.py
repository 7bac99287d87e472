"""HydraQwen3: M head-pruned Qwen3 classifiers of texts as one network."""

from transformers import Qwen3ForSequenceClassification, Qwen3ForTokenClassification, Qwen3Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3PreTrainedModel

from .configuration_hydra_qwen3 import HydraQwen3Config
from .decoders import DECODER_RULES, HydraDecoderClassifierMixin, HydraDecoderMixin, HydraNormedDecoderAttention
from .pretrained import HydraModelMixin
from .texts import HydraTextClassifierMixin
from .tokens import HydraTokenClassifierMixin


class HydraQwen3PreTrainedModel(HydraModelMixin, Qwen3PreTrainedModel):
    config_class = HydraQwen3Config
    config: HydraQwen3Config
    base_model_prefix = "model"
    architecture = "Qwen3"
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraLayer"]
    backbone_types = ("qwen3",)
    backbone_rules = DECODER_RULES


class HydraQwen3Model(HydraDecoderMixin, HydraQwen3PreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (Qwen3Model,)
    attention_class = HydraNormedDecoderAttention


class HydraQwen3ForSequenceClassification(HydraDecoderClassifierMixin, HydraQwen3PreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Qwen3ForSequenceClassification,)
    encoder_class = HydraQwen3Model


class HydraQwen3ForTokenClassification(HydraTokenClassifierMixin, HydraTextClassifierMixin, HydraQwen3PreTrainedModel):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Qwen3ForTokenClassification,)
    encoder_class = HydraQwen3Model


__all__ = [
    "HydraQwen3ForSequenceClassification",
    "HydraQwen3ForTokenClassification",
    "HydraQwen3Model",
    "HydraQwen3PreTrainedModel",
]
