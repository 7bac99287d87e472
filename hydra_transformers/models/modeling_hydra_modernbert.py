"""HydraModernBert: M head-pruned ModernBERT encoders as one network.

Some layers see the whole text, the others a window around each token; both kinds have a mask and a
table of rotary positions of their own, made once per forward.
"""

import math
from functools import partial

import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask
from transformers.models.modernbert.modeling_modernbert import (
    ModernBertEmbeddings,
    ModernBertPreTrainedModel,
    ModernBertRotaryEmbedding,
)

from .configuration_hydra_modernbert import HydraModernBertConfig
from .fixed_dtype import FixedDtype
from .modeling_hydra import Grouped, GroupedLinear, GroupedOutput, Norm, encoder_mask
from .pretrained import HydraModelMixin
from .rotary_attention import HydraRotaryAttention
from .texts import HydraTextClassifierMixin, HydraTextEncoderMixin
from .tokens import HydraTokenClassifierMixin


MASKS = {"full_attention": create_bidirectional_mask, "sliding_attention": create_bidirectional_sliding_window_mask}


class HydraModernBertPreTrainedModel(HydraModelMixin, ModernBertPreTrainedModel):
    config_class = HydraModernBertConfig
    base_model_prefix = "model"
    architecture = "ModernBERT"
    _no_split_modules = ["ModernBertEmbeddings", "HydraLayer"]

    def initial_std(self, module: Grouped) -> float:
        std = super().initial_std(module)
        if isinstance(module, GroupedOutput):
            return std / math.sqrt(2 * self.config.num_hidden_layers)
        return std


class HydraModernBertRotaryEmbedding(FixedDtype, ModernBertRotaryEmbedding):
    """A table for each kind of layers."""


class HydraModernBertAttention(HydraRotaryAttention):
    float32_rotary = True


class HydraModernBertModel(HydraTextEncoderMixin, HydraModernBertPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`; pooled, where
    `config.classifier_pooling` asks for it, is the mean of the tokens that are not padding."""

    embeddings_class = ModernBertEmbeddings
    attention_class = HydraModernBertAttention
    word_embeddings_name = "tok_embeddings"
    last_norm = "final_norm"
    last_hidden_state_is_normed = True

    def __init__(self, config: HydraModernBertConfig):
        super().__init__(config)
        self.layers[0].attention_norm = nn.Identity()  # behind the norm of the embeddings

    def make_norm(self, config: HydraModernBertConfig) -> Norm:
        return partial(nn.LayerNorm, eps=config.norm_eps, bias=config.norm_bias)

    def add_positions(self, config: HydraModernBertConfig) -> None:
        self.rotary_emb = HydraModernBertRotaryEmbedding(config)

    def embed_inputs(
        self, attention_mask: torch.Tensor | None = None, position_ids: torch.Tensor | None = None, **inputs
    ):
        hidden_states, _, _ = super().embed_inputs(**inputs)
        if position_ids is None:
            position_ids = torch.arange(hidden_states.shape[2], device=hidden_states.device).unsqueeze(0)
        kinds = sorted(set(self.config.layer_types))
        masks = {kind: encoder_mask(self.config, hidden_states, attention_mask, MASKS[kind]) for kind in kinds}
        if attention_mask is None and "full_attention" in masks:
            masks["full_attention"] = None
        tables = {kind: self.rotary_emb(hidden_states, position_ids, kind) for kind in kinds}
        layer_kwargs = {"positions": (tables,), "deterministic": self.config.deterministic_flash_attn}
        return hidden_states, masks, layer_kwargs

    def pool(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **inputs
    ) -> torch.Tensor | None:
        if self.config.classifier_pooling == "cls":
            return None
        if attention_mask is None:
            return hidden_states.mean(dim=2)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, and config.classifier_pooling is "
                "'mean', which needs to know the padding: pass a mask of shape (batch, tokens)"
            )
        weights = attention_mask.to(hidden_states.device).unsqueeze(-1)  # (batch, tokens, 1)
        return (hidden_states * weights).sum(dim=2) / weights.sum(dim=1)


class GroupedLayerNorm(nn.Module):
    """A LayerNorm per member, on (members, ..., size); weight and bias (members, size), which are
    `per_member_parameters`."""

    def __init__(self, size: int, num_members: int, eps: float, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_members, size))
        self.register_parameter("bias", None)
        if bias:
            self.bias = nn.Parameter(torch.zeros(num_members, size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        size = hidden_states.shape[-1:]
        weights = self.weight.unbind()
        biases = [None] * len(weights)
        if self.bias is not None:
            biases = self.bias.unbind()
        normed = []
        for states, weight, bias in zip(hidden_states.unbind(), weights, biases, strict=True):
            # One by one: the fused kernel rounds once.
            normed.append(nn.functional.layer_norm(states, size, weight, bias, self.eps))
        return torch.stack(normed)


class HydraModernBertHead(nn.Module):
    """A map, an activation and a LayerNorm per member: (members, ..., hidden) -> (members, ...,
    hidden)."""

    def __init__(self, config: HydraModernBertConfig):
        super().__init__()
        size = config.hidden_size
        members = config.num_members
        self.dense = GroupedLinear(size, [size] * members, config.classifier_bias)
        self.act = ACT2FN[config.classifier_activation]
        self.norm = GroupedLayerNorm(size, members, config.norm_eps, config.norm_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(self.dense(features)))


class ModernBertClassifierMixin:
    """The head of ModernBERT's classifiers of texts and of tokens."""

    per_member_parameters = ("head.norm.weight", "head.norm.bias")

    def add_head(self, config: HydraModernBertConfig) -> None:
        self.head = HydraModernBertHead(config)
        self.drop = nn.Dropout(config.classifier_dropout)
        self.classifier = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members)

    def initial_std(self, module: Grouped) -> float:
        if module is self.classifier:
            return module.columns**-0.5
        return super().initial_std(module)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return self.drop(self.head(super().prepare(hidden_states, pooled)))


class HydraModernBertForSequenceClassification(
    ModernBertClassifierMixin, HydraTextClassifierMixin, HydraModernBertPreTrainedModel
):
    encoder_class = HydraModernBertModel

    @property
    def reads_first_token(self) -> bool:
        return self.config.classifier_pooling == "cls"


class HydraModernBertForTokenClassification(
    ModernBertClassifierMixin, HydraTokenClassifierMixin, HydraModernBertPreTrainedModel
):
    encoder_class = HydraModernBertModel
