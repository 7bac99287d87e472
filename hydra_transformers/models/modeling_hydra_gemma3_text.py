"""HydraGemma3Text: M head-pruned Gemma 3 classifiers of texts as one network.

Some layers see the whole text, the others a window; both kinds have rotary positions of their own.
"""

from functools import partial

import torch
from transformers import Gemma3TextForSequenceClassification, Gemma3TextModel, PreTrainedConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3PreTrainedModel, Gemma3RotaryEmbedding

from .configuration_hydra_gemma3_text import HydraGemma3TextConfig
from .decoders import (
    DECODER_RULES,
    HydraDecoderClassifierMixin,
    HydraDecoderMixin,
    HydraNormedDecoderAttention,
    HydraOffsetRMSNorm,
    HydraScaledEmbedding,
)
from .modeling_hydra import FixedDtype, HydraAttention, HydraLayer, Norm, shared_or_per_member
from .pretrained import HydraModelMixin, Rule
from .rotary_attention import RotaryTables


class HydraGemma3TextPreTrainedModel(HydraModelMixin, Gemma3PreTrainedModel):
    config_class = HydraGemma3TextConfig
    config: HydraGemma3TextConfig
    base_model_prefix = "model"
    architecture = "Gemma 3"
    input_modalities = ("text",)
    _no_split_modules = ["HydraDecoderEmbeddings", "HydraGemma3Layer"]
    backbone_types = ("gemma3_text",)
    backbone_rules = (
        Rule("layers.*.attention_branch_norm.*", "layers.*.post_attention_layernorm.*"),
        Rule("layers.*.mlp_norm.*", "layers.*.pre_feedforward_layernorm.*"),
        Rule("layers.*.mlp_branch_norm.*", "layers.*.post_feedforward_layernorm.*"),
        *DECODER_RULES,
    )


class HydraGemma3Layer(HydraLayer):
    """A branch is normed before it is added to the residual stream, too."""

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm, attention_class: type[HydraAttention]):
        super().__init__(config, layer, norm, attention_class)
        self.attention_branch_norm, self.mlp_branch_norm = (
            shared_or_per_member(config, "layernorm", partial(norm, config.hidden_size), layer) for _ in range(2)
        )

    def project_and_feed(self, hidden_states: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + self.attention_branch_norm(self.attention.o_proj(heads))
        return hidden_states + self.mlp_branch_norm(self.mlp(self.mlp_norm(hidden_states)))


class HydraGemma3RotaryEmbedding(FixedDtype, Gemma3RotaryEmbedding):
    """A table for each kind of layers."""


class HydraGemma3TextModel(HydraDecoderMixin, HydraGemma3TextPreTrainedModel):
    """The fused decoder without a head: `HydraModelOutput`."""

    backbone_classes = (Gemma3TextModel,)
    embedding_class = HydraScaledEmbedding
    norm_class = HydraOffsetRMSNorm
    rotary_class = HydraGemma3RotaryEmbedding
    attention_class = HydraNormedDecoderAttention
    layer_class = HydraGemma3Layer

    def rotary_tables(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, RotaryTables]:
        kinds = sorted(set(self.config.layer_types))
        return {kind: self.rotary_emb(hidden_states, position_ids, kind) for kind in kinds}


class HydraGemma3TextForSequenceClassification(HydraDecoderClassifierMixin, HydraGemma3TextPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (Gemma3TextForSequenceClassification,)
    encoder_class = HydraGemma3TextModel


__all__ = ["HydraGemma3TextForSequenceClassification", "HydraGemma3TextModel", "HydraGemma3TextPreTrainedModel"]
