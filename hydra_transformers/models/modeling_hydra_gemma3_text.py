"""HydraGemma3Text: M head-pruned Gemma 3 classifiers of texts as one network.

Some layers see the whole text, the others a window; both kinds have rotary positions of their own.
"""

import torch
from transformers import Gemma3TextForSequenceClassification, Gemma3TextModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel, Gemma3RotaryEmbedding

from .configuration_hydra_gemma3_text import HydraGemma3TextConfig
from .decoders import (
    DECODER_RULES,
    HydraDecoderClassifierMixin,
    HydraDecoderMixin,
    HydraOffsetRMSNorm,
    HydraScaledEmbedding,
)
from .modeling_hydra import FixedDtype, RotaryTables
from .pretrained import HydraModelMixin, Rule


class HydraGemma3TextPreTrainedModel(HydraModelMixin, Gemma3PreTrainedModel):
    config_class = HydraGemma3TextConfig
    config: HydraGemma3TextConfig
    base_model_prefix = "model"
    architecture = "Gemma 3"
    input_modalities = ("text",)
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraLayer"]
    backbone_types = ("gemma3_text",)
    backbone_rules = (
        Rule("layers.*.attention_branch_norm.*", "layers.*.post_attention_layernorm.*"),
        Rule("layers.*.mlp_norm.*", "layers.*.pre_feedforward_layernorm.*"),
        Rule("layers.*.mlp_branch_norm.*", "layers.*.post_feedforward_layernorm.*"),
        *DECODER_RULES,
    )


class HydraGemma3RotaryEmbedding(FixedDtype, Gemma3RotaryEmbedding):
    """A table for each kind of layers."""


class HydraGemma3TextModel(HydraDecoderMixin, HydraGemma3TextPreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (Gemma3TextModel,)
    embedding_class = HydraScaledEmbedding
    norm_class = HydraOffsetRMSNorm
    rotary_class = HydraGemma3RotaryEmbedding

    def rotary_tables(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, RotaryTables]:
        kinds = sorted(set(self.config.layer_types))
        return {kind: self.rotary_emb(hidden_states, position_ids, kind) for kind in kinds}


class HydraGemma3TextForSequenceClassification(HydraDecoderClassifierMixin, HydraGemma3TextPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Gemma3TextForSequenceClassification,)
    encoder_class = HydraGemma3TextModel


__all__ = ["HydraGemma3TextForSequenceClassification", "HydraGemma3TextModel", "HydraGemma3TextPreTrainedModel"]
