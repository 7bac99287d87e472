"""HydraModernBert: M head-pruned ModernBERT encoders as one network.

Some layers see the whole text, the others a window around each token; both kinds have a mask and a table of rotary positions
of their own, made once per forward.
"""

import math

import torch
from torch import nn
from transformers import ModernBertForSequenceClassification, ModernBertModel
from transformers.activations import ACT2FN
from transformers.models.modernbert.modeling_modernbert import (
    ModernBertEmbeddings,
    ModernBertPreTrainedModel,
    ModernBertRotaryEmbedding,
)
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import encoder_mask, sliding_mask
from .configuration_hydra_modernbert import HydraModernBertConfig
from .ensembling import HydraModelOutput
from .fixed_dtype import FixedDtype
from .grouped import Grouped, GroupedLayerNorm, GroupedLinear, GroupedOutput, of_members
from .layer import hydra_layers
from .modeling_hydra import HydraModelMixin, Rule, attention_rules
from .texts import HydraTextEncoderMixin, HydraUntypedTextClassifierMixin


MASKS = {"full_attention": encoder_mask, "sliding_attention": sliding_mask}


class HydraModernBertPreTrainedModel(HydraModelMixin, ModernBertPreTrainedModel):
    config_class = HydraModernBertConfig
    config: HydraModernBertConfig
    base_model_prefix = "model"
    architecture = "ModernBERT"
    _no_split_modules = ["ModernBertEmbeddings", "HydraLayer"]
    backbone_types = ("modernbert",)
    backbone_rules = (
        *attention_rules("layers.*.attn.{}", ("Wqkv", "Wo")),
        Rule("layers.*.attention_norm.*", "layers.*.attn_norm.*"),
        Rule("layers.*.mlp.fc1.*", "layers.*.mlp.Wi.*"),
        Rule("layers.*.mlp.fc2.*", "layers.*.mlp.Wo.*"),
    )

    def initial_std(self, module: Grouped) -> float:
        std = super().initial_std(module)
        return std / math.sqrt(2 * self.config.num_hidden_layers) if isinstance(module, GroupedOutput) else std


class HydraModernBertRotaryEmbedding(FixedDtype, ModernBertRotaryEmbedding):
    """A table for each kind of layers."""


class HydraModernBertModel(HydraTextEncoderMixin, HydraModernBertPreTrainedModel):
    """The fused encoder without a head: `HydraModelOutput`; pooled, where `config.classifier_pooling` asks for it, is the
    mean of the tokens that are no padding."""

    backbone_classes = (ModernBertModel,)
    word_embeddings_name = "tok_embeddings"
    last_norm = "final_norm"

    def __init__(self, config: HydraModernBertConfig):
        super().__init__(config)
        self.embeddings = of_members(config, "embeddings", lambda: ModernBertEmbeddings(config))
        self.layers = hydra_layers(config)
        self.final_norm = of_members(
            config, "layernorm", lambda: nn.LayerNorm(config.hidden_size, eps=config.norm_eps, bias=config.norm_bias)
        )
        self.rotary_emb = HydraModernBertRotaryEmbedding(config)
        self.post_init()

    def start(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ):
        states = self.embedded(input_ids, inputs_embeds)
        if position_ids is None:
            position_ids = torch.arange(states.shape[2], device=states.device).unsqueeze(0)
        kinds = sorted(set(self.config.layer_types))
        masks = {kind: MASKS[kind](self.config, states, attention_mask) for kind in kinds}
        tables = {kind: self.rotary_emb(states, position_ids, kind) for kind in kinds}
        for_layers = {"position_embeddings": tables, "deterministic": self.config.deterministic_flash_attn}
        return states, masks, for_layers

    def finish(self, states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        return self.pool(self.final_norm(states), attention_mask)

    def pool(self, states: torch.Tensor, attention_mask: torch.Tensor | None = None):
        if self.config.classifier_pooling == "cls":
            return states, None
        if attention_mask is None:
            return states, states.mean(dim=2)
        if attention_mask.dim() != 2:
            raise ValueError(
                f"attention_mask has the shape {tuple(attention_mask.shape)}, and config.classifier_pooling is 'mean', which "
                "needs to know the padding: pass a mask of shape (batch, tokens)"
            )
        weights = attention_mask.to(states.device).unsqueeze(-1)  # (batch, tokens, 1)
        return states, (states * weights).sum(dim=2) / weights.sum(dim=1)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        first_token_only: bool = False,
        members_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        first_token_only, members_only: compute no more than a classifier reads, see `encode`
        """
        states, masks, for_layers = self.start(input_ids, attention_mask, position_ids, inputs_embeds)
        finish_with = {"attention_mask": attention_mask}
        return self.encode(
            states, masks, first_token_only, members_only, finish_with=finish_with, **for_layers, **kwargs
        )


class HydraModernBertHead(nn.Module):
    """A map, an activation and a LayerNorm per member: (members, batch, hidden) -> (members, batch, hidden)."""

    def __init__(self, config: HydraModernBertConfig):
        super().__init__()
        size, members = config.hidden_size, config.num_members
        self.dense = GroupedLinear(size, [size] * members, config.classifier_bias)
        self.act = ACT2FN[config.classifier_activation]
        self.norm = GroupedLayerNorm(size, members, config.norm_eps, config.norm_bias)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.act(self.dense(features)))


class HydraModernBertForSequenceClassification(HydraUntypedTextClassifierMixin, HydraModernBertPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    backbone_classes = (ModernBertForSequenceClassification,)
    per_member_parameters = ("head.norm.weight", "head.norm.bias")

    def __init__(self, config: HydraModernBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = HydraModernBertModel(config)
        self.head = HydraModernBertHead(config)
        self.drop = nn.Dropout(config.classifier_dropout)
        self.classifier = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members)
        self.post_init()

    @property
    def reads_first_token(self) -> bool:
        return self.config.classifier_pooling == "cls"

    def initial_std(self, module: Grouped) -> float:
        return module.columns**-0.5 if module is self.classifier else super().initial_std(module)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.drop(self.head(features))


__all__ = [
    "HydraModernBertForSequenceClassification",
    "HydraModernBertModel",
    "HydraModernBertPreTrainedModel",
]
