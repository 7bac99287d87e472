"""Encoders and classifiers of texts."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .modeling_hydra import (
    GroupedLinear,
    GroupedPooler,
    HydraClassifierMixin,
    HydraClassifierOutput,
    HydraEncoderMixin,
    HydraModelOutput,
    PerMember,
)


class HydraTextEncoderMixin(HydraEncoderMixin):
    """A fused encoder of texts, without a head: `HydraModelOutput`."""

    word_embeddings_name = "word_embeddings"  # inside of the embeddings

    def get_input_embeddings(self) -> nn.Module:
        """Return the word embeddings; those of the first member where members do not share them."""
        return getattr(self.first_embeddings(), self.word_embeddings_name)

    def set_input_embeddings(self, value: nn.Module):
        if isinstance(self.embeddings, PerMember):
            raise ValueError("each member has word embeddings of its own: change them in the members, then fuse these")
        setattr(self.embeddings, self.word_embeddings_name, value)

    def embed_inputs(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **inputs,
    ):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        return super().embed_inputs(attention_mask, input_ids=input_ids, inputs_embeds=inputs_embeds, **inputs)

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden)
        kwargs: of `encode`, too
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode(inputs, **kwargs)


class HydraTypedTextEncoderMixin(HydraTextEncoderMixin):
    def add_pooling(self, config: PreTrainedConfig) -> None:
        if hasattr(config, "add_pooling_layer"):
            self.pooler = GroupedPooler(config.hidden_size, config.hidden_size, config.num_members, nn.Tanh())

    @merge_with_config_defaults
    @capture_outputs(tie_last_hidden_states=False)
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """
        token_type_ids: (batch, tokens); others as in `HydraTextEncoderMixin.forward`
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode(inputs, **kwargs)


class HydraTextClassifierMixin(HydraClassifierMixin):
    """A fused text classifier: `logits` is the ensemble's prediction, `member_logits` each
    member's."""

    def pipeline_class(self) -> type:
        from .pipeline_hydra_text import HydraTextClassificationPipeline  # not above, as in `predict`

        return HydraTextClassificationPipeline

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        input_ids, attention_mask, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden)
        labels: (batch,) class indices, or what the task's loss takes
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


class HydraTypedTextClassifierMixin(HydraTextClassifierMixin):
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
        token_type_ids: (batch, tokens); others as in `HydraTextClassifierMixin.forward`
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


class GroupedClassificationHead(nn.Module):
    """A head of two maps per member, with dropout before each."""

    def __init__(self, config: PreTrainedConfig, activation: nn.Module, dropout: float):
        super().__init__()
        members = config.num_members
        self.dense = GroupedLinear(config.hidden_size, [config.hidden_size] * members)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.out_proj = GroupedLinear(config.hidden_size, [config.num_labels] * members)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Return what the second map reads: (members, batch, hidden) -> (members, batch, hidden)"""
        features = self.dense(self.dropout(features))
        return self.dropout(self.activation(features))


class HydraTwoMapTextClassifierMixin(HydraTypedTextClassifierMixin):
    """With a head of two maps, dense and out_proj, as RoBERTa's."""

    head_activation: type[nn.Module] = nn.Tanh
    last_map = "classifier.out_proj"

    def add_head(self, config: PreTrainedConfig) -> None:
        dropout = getattr(config, "classifier_dropout", None)
        if dropout is None:
            dropout = config.hidden_dropout_prob
        self.classifier = GroupedClassificationHead(config, self.head_activation(), dropout)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        return self.classifier(hidden_states[:, :, 0])
