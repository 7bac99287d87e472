"""HydraBert: M head-pruned BERT encoders as one network."""

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.bert.modeling_bert import BertEmbeddings, BertPreTrainedModel
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import (
    HydraAttention,
    HydraMLP,
    encoder_mask,
    has_rows,
    mask_of_first_token,
)
from .bare_layers import run_layers
from .configuration_hydra_bert import HydraBertConfig
from .ensembling import (
    HydraClassifierOutput,
    RecordedStates,
    batch_first,
    classifier_output,
    wants_every_token,
)
from .fusion import HydraModelMixin
from .grouped import Grouped, GroupedLinear, GroupedPooler, PerMember, embed, init_grouped, shared_or_per_member
from .kernels import add_and_layer_norm


class HydraBertLayer(GradientCheckpointingLayer):
    """The fused Transformer layer in BERT's post-norm form: equations 4 to 7 with each LayerNorm after its residual
    sum instead of before the branch."""

    norms = ("attention_layernorm", "output_layernorm")
    is_pre_norm = False

    def __init__(self, config: HydraBertConfig, layer: int):
        super().__init__()
        members, shared = config.num_members, config.shared

        def layernorm():
            return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)

        self.attention = HydraAttention(
            config,
            config.kept_heads[layer],
            dropout=config.attention_probs_dropout_prob,
            bias=True,
            float32_softmax=False,
        )
        self.attention_layernorm = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.mlp = shared_or_per_member(lambda: HydraMLP(config), members, "mlp" in shared)
        self.output_layernorm = shared_or_per_member(layernorm, members, "layernorm" in shared)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs,
    ) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden)"""
        residual = hidden_states
        queries = None
        if first_token_only:
            residual = queries = hidden_states[:, :, :1]
            attention_mask = mask_of_first_token(attention_mask)
        attention, _ = self.attention(hidden_states, attention_mask, queries, **kwargs)
        _, hidden_states = add_and_layer_norm(self.attention_layernorm, residual, self.dropout(attention))
        _, output = add_and_layer_norm(self.output_layernorm, hidden_states, self.dropout(self.mlp(hidden_states)))
        return output


class HydraBertPreTrainedModel(HydraModelMixin, BertPreTrainedModel):
    config_class = HydraBertConfig
    config: HydraBertConfig
    base_model_prefix = "bert"
    _no_split_modules = ["BertEmbeddings", "HydraBertLayer"]
    _can_record_outputs = {"hidden_states": RecordedStates, "attentions": HydraAttention}
    backbone_types = ("bert",)
    backbone_names = (
        ("layers.", "encoder.layer."),
        (".attention.q_proj.", ".attention.self.query."),
        (".attention.k_proj.", ".attention.self.key."),
        (".attention.v_proj.", ".attention.self.value."),
        (".attention.o_proj.", ".attention.output.dense."),
        (".attention_layernorm.", ".attention.output.LayerNorm."),
        (".mlp.fc1.", ".intermediate.dense."),
        (".mlp.fc2.", ".output.dense."),
        (".output_layernorm.", ".output.LayerNorm."),
    )

    @torch.no_grad()
    def _init_weights(self, module: nn.Module):
        super()._init_weights(module)
        if isinstance(module, Grouped):
            init_grouped(module, std=self.config.initializer_range)


class HydraBertModel(HydraBertPreTrainedModel):
    """The fused encoder without a head. `last_hidden_state` is (batch, members, tokens, hidden), `pooler_output`
    (batch, members, hidden)."""

    is_base_model = True

    def __init__(self, config: HydraBertConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        members, shared = config.num_members, config.shared
        self.embeddings = shared_or_per_member(lambda: BertEmbeddings(config), members, "embeddings" in shared)
        self.layers = nn.ModuleList(HydraBertLayer(config, layer) for layer in range(config.num_hidden_layers))
        self.recorded_states = RecordedStates()
        add_pooling_layer = config.add_pooling_layer if add_pooling_layer is None else add_pooling_layer
        self.pooler = None
        if add_pooling_layer:
            self.pooler = GroupedPooler(config.hidden_size, config.hidden_size, members, nn.Tanh())
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings; those of the first member where members do not share them."""
        return next(module for module in self.embeddings.modules() if isinstance(module, nn.Embedding))

    def set_input_embeddings(self, value: nn.Module):
        if isinstance(self.embeddings, PerMember):
            raise ValueError("each member has word embeddings of its own: change them in the members, then fuse these")
        self.embeddings.word_embeddings = value

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        first_token_only: bool = False,
        **kwargs,
    ) -> BaseModelOutputWithPooling:
        """
        input_ids, attention_mask, token_type_ids, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        first_token_only: let the last layer compute the [CLS] token alone, which is all that the pooler reads;
            `last_hidden_state` then has one token
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        embeddings = embed(
            self.embeddings,
            input_ids=input_ids,
            position_ids=position_ids,
            token_type_ids=token_type_ids,
            inputs_embeds=inputs_embeds,
        )
        attention_mask = encoder_mask(self.config, embeddings, attention_mask, self.num_members)
        first_token_only = first_token_only and has_rows(attention_mask)

        hidden_states = run_layers(self, embeddings, attention_mask, first_token_only, **kwargs)

        pooled = None if self.pooler is None else self.pooler(hidden_states)
        return BaseModelOutputWithPooling(
            last_hidden_state=batch_first(hidden_states, self.num_members),
            pooler_output=None if pooled is None else batch_first(pooled, self.num_members),
        )


class HydraBertForSequenceClassification(HydraBertPreTrainedModel):
    """The fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    def __init__(self, config: HydraBertConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.bert = HydraBertModel(config, add_pooling_layer=True)
        has_own_dropout = config.classifier_dropout is not None
        self.dropout = nn.Dropout(config.classifier_dropout if has_own_dropout else config.hidden_dropout_prob)
        self.classifier = GroupedLinear(config.hidden_size, [config.num_labels] * config.num_members)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        input_ids, attention_mask, token_type_ids, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        """
        outputs = self.bert(
            input_ids,
            attention_mask=attention_mask,
            token_type_ids=token_type_ids,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            first_token_only=not wants_every_token(self.config, kwargs),
            return_dict=True,
            **kwargs,
        )
        pooled = self.dropout(outputs.pooler_output.transpose(0, 1))
        member_logits = batch_first(self.classifier(pooled), self.num_members)
        return classifier_output(self, member_logits, labels, outputs, **kwargs)


__all__ = ["HydraBertForSequenceClassification", "HydraBertModel", "HydraBertPreTrainedModel"]
