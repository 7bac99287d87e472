"""Encoders and classifiers of texts."""

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .modeling_hydra import (
    GroupedLinear,
    HydraClassifierMixin,
    HydraClassifierOutput,
    HydraEncoderMixin,
    HydraModelOutput,
    PerMember,
    embed,
    encoder_mask,
)


class HydraTextEncoderMixin(HydraEncoderMixin):
    """A fused encoder of texts, without a head: `HydraModelOutput`."""

    word_embeddings_name = "word_embeddings"  # inside of the embeddings

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings; those of the first member where members do not share them."""
        return getattr(self.first_embeddings(), self.word_embeddings_name)

    def set_input_embeddings(self, value: nn.Module):
        if isinstance(self.embeddings, PerMember):
            raise ValueError("each member has word embeddings of its own: change them in the members, then fuse these")
        setattr(self.embeddings, self.word_embeddings_name, value)

    def embed_words(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, **for_embeddings
    ) -> torch.Tensor:
        """(batch, tokens) or (batch, tokens, hidden) -> (members or 1, batch, tokens, hidden)"""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        return embed(self.embeddings, input_ids=input_ids, inputs_embeds=inputs_embeds, **for_embeddings)

    def embed_inputs(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **for_embeddings,
    ):
        hidden_states = self.embed_words(input_ids, inputs_embeds, **for_embeddings)
        mask = None if attention_mask is None else encoder_mask(self.config, hidden_states, attention_mask)
        return hidden_states, mask, {}

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
        """input_ids, attention_mask, position_ids: (batch, tokens); inputs_embeds: (batch, tokens, hidden); others: `encode`"""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode(inputs, **kwargs)


class HydraTypedTextEncoderMixin(HydraTextEncoderMixin):
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
        """As `HydraTextEncoderMixin.forward`; token_type_ids: (batch, tokens)"""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode(inputs, **kwargs)


class HydraTextClassifierBase(HydraClassifierMixin):
    """A fused text classifier: `logits` is the ensemble's answer, `member_logits` each member's."""

    def pipeline_class(self) -> type:
        from .pipeline_hydra_text import HydraTextClassificationPipeline  # not above, as in `predict`

        return HydraTextClassificationPipeline


class HydraTypedTextClassifierMixin(HydraTextClassifierBase):
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
        """As `HydraTextClassifierMixin.forward`; token_type_ids: (batch, tokens)"""
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


class HydraTextClassifierMixin(HydraTextClassifierBase):
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
        """input_ids, attention_mask, position_ids: (batch, tokens); inputs_embeds: (batch, tokens, hidden)
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.encode_and_classify(inputs, labels, **kwargs)


class GroupedClassificationHead(nn.Module):
    """A head of two maps per member, with dropout before each: (members, batch, hidden) -> (members, batch, classes)."""

    def __init__(self, config: PreTrainedConfig, activation: nn.Module, dropout: float | None = None):
        """dropout: by default `config.hidden_dropout_prob`"""
        super().__init__()
        members = config.num_members
        self.dense = GroupedLinear(config.hidden_size, [config.hidden_size] * members)
        self.activation = activation
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.out_proj = GroupedLinear(config.hidden_size, [config.head_width] * members)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """What the second map reads: (members, batch, hidden) -> (members, batch, hidden)"""
        return self.dropout(self.activation(self.dense(self.dropout(features))))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.prepare(features))


class HydraTwoMapTextClassifierMixin(HydraTypedTextClassifierMixin):
    """With a head of two maps, dense and out_proj, as RoBERTa's."""

    head_activation: type[nn.Module] = nn.Tanh

    def add_head(self, config: PreTrainedConfig) -> None:
        dropout = getattr(config, "classifier_dropout", None)
        self.classifier = GroupedClassificationHead(config, self.head_activation(), dropout)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier.prepare(features)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features)
