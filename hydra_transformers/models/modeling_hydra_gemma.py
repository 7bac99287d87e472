"""HydraGemma: M head-pruned Gemma classifiers of texts as one network."""

import torch
from torch import nn
from transformers import GemmaForSequenceClassification, GemmaForTokenClassification, GemmaModel
from transformers.models.gemma.modeling_gemma import GemmaPreTrainedModel

from .configuration_hydra_gemma import HydraGemmaConfig
from .decoders import DECODER_RULES, HydraDecoderClassifierMixin, HydraDecoderMixin, HydraOffsetRMSNorm
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


class HydraGemmaEmbedding(nn.Embedding):
    """Word embeddings times the root of their size."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        # Rounded to the type of the weights before it multiplies, as Gemma has it.
        scale = torch.full((), self.embedding_dim**0.5, dtype=self.weight.dtype, device=self.weight.device)
        return super().forward(input) * scale


class HydraGemmaModel(HydraDecoderMixin, HydraGemmaPreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (GemmaModel,)
    embedding_class = HydraGemmaEmbedding
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
