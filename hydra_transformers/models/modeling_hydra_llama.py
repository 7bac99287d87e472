"""HydraLlama: M head-pruned Llama classifiers of texts as one network."""

from transformers import LlamaForSequenceClassification, LlamaForTokenClassification, LlamaModel
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from .configuration_hydra_llama import HydraLlamaConfig
from .decoders import DECODER_RULES, HydraDecoderClassifierMixin, HydraDecoderMixin
from .pretrained import HydraModelMixin
from .texts import HydraTextClassifierMixin
from .tokens import HydraTokenClassifierMixin


class HydraLlamaPreTrainedModel(HydraModelMixin, LlamaPreTrainedModel):
    config_class = HydraLlamaConfig
    config: HydraLlamaConfig
    base_model_prefix = "model"
    architecture = "Llama"
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraLayer"]
    backbone_types = ("llama",)
    backbone_rules = DECODER_RULES


class HydraLlamaModel(HydraDecoderMixin, HydraLlamaPreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (LlamaModel,)


class HydraLlamaForSequenceClassification(HydraDecoderClassifierMixin, HydraLlamaPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (LlamaForSequenceClassification,)
    encoder_class = HydraLlamaModel


class HydraLlamaForTokenClassification(HydraTokenClassifierMixin, HydraTextClassifierMixin, HydraLlamaPreTrainedModel):
    """The fused classifier of tokens: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (LlamaForTokenClassification,)
    encoder_class = HydraLlamaModel


__all__ = [
    "HydraLlamaForSequenceClassification",
    "HydraLlamaForTokenClassification",
    "HydraLlamaModel",
    "HydraLlamaPreTrainedModel",
]
