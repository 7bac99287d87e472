"""Encoders and classifiers of texts."""

import torch
from torch import nn
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention import encoder_mask
from .encoder import HydraEncoderMixin
from .ensembling import HydraClassifierMixin, HydraClassifierOutput, HydraModelOutput
from .grouped import PerMember, embed


class HydraTextEncoderMixin(HydraEncoderMixin):
    """An encoder of texts: embeddings of words and their positions."""

    word_embeddings_name = "word_embeddings"  # inside of the embeddings

    def get_input_embeddings(self) -> nn.Module:
        """The word embeddings; those of the first member where members do not share them."""
        return getattr(self.first_embeddings(), self.word_embeddings_name)

    def set_input_embeddings(self, value: nn.Module):
        if isinstance(self.embeddings, PerMember):
            raise ValueError("each member has word embeddings of its own: change them in the members, then fuse these")
        setattr(self.embeddings, self.word_embeddings_name, value)

    def embedded(
        self, input_ids: torch.Tensor | None, inputs_embeds: torch.Tensor | None, **for_embeddings
    ) -> torch.Tensor:
        """(batch, tokens) or (batch, tokens, hidden) -> (members or 1, batch, tokens, hidden)"""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("pass input_ids or inputs_embeds, and not both")
        return embed(self.embeddings, input_ids=input_ids, inputs_embeds=inputs_embeds, **for_embeddings)

    def start(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        **for_embeddings,
    ):
        states = self.embedded(input_ids, inputs_embeds, **for_embeddings)
        return states, encoder_mask(self.config, states, attention_mask), {}

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
        members_only: bool = False,
        **kwargs,
    ) -> HydraModelOutput:
        """
        input_ids, attention_mask, token_type_ids, position_ids: (batch, tokens)
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        first_token_only, members_only: compute no more than a classifier reads, see `encode`
        """
        for_embeddings = {"position_ids": position_ids, "token_type_ids": token_type_ids}
        states, mask, for_layers = self.start(input_ids, attention_mask, inputs_embeds, **for_embeddings)
        return self.encode(states, mask, first_token_only, members_only, **for_layers, **kwargs)


class HydraTextClassifierMixin(HydraClassifierMixin):
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
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.answer(labels, inputs, **kwargs)


class HydraUntypedTextClassifierMixin(HydraClassifierMixin):
    """A classifier of texts that knows no token types."""

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
        inputs_embeds: (batch, tokens, hidden), in place of input_ids
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        """
        inputs = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        return self.answer(labels, inputs, **kwargs)


class HydraTwoMapTextClassifierMixin(HydraTextClassifierMixin):
    """With a `GroupedClassificationHead`."""

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier.prepare(features)

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        return self.classifier(features)
