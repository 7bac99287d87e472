"""What every fused classifier does with its encoder's states."""

import torch
from transformers.utils.generic import can_return_tuple

from .ensembling import HydraClassifierOutput, HydraModelOutput, batch_first, classifier_output, wants_every_token


class HydraClassifierMixin:
    """A head per member on a fused encoder: `logits` is the ensemble's answer, `member_logits` each member's.

    A family says what its head reads of the states and how it answers, where that is not the usual.
    """

    # Whether the head reads the first token's state alone, so that the last layer need not compute the others.
    reads_first_token = True

    def read(self, states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        """What the head reads: (members, batch, tokens or 1, hidden) and (members, batch, pooled) -> (members, batch,
        features)"""
        return states[:, :, 0] if pooled is None else pooled

    def classify(self, features: torch.Tensor) -> torch.Tensor:
        """(members, batch, features) -> (members, batch, classes)"""
        return self.classifier(features)

    def answer(self, labels: torch.Tensor | None, inputs: dict, **kwargs) -> HydraClassifierOutput:
        """The encoder on `inputs`, and what the members make of it."""
        outputs: HydraModelOutput = self.base_model(
            **inputs,
            first_token_only=self.reads_first_token and not wants_every_token(self.config, kwargs),
            members_only=True,
            return_dict=True,
            **kwargs,
        )
        states, pooled = outputs.member_last_hidden_state, outputs.member_pooler_output
        features = self.read(states.transpose(0, 1), None if pooled is None else pooled.transpose(0, 1))
        member_logits = batch_first(self.classify(features), self.num_members)
        return classifier_output(self, member_logits, labels, outputs, **kwargs)


class HydraImageClassifierMixin(HydraClassifierMixin):
    @can_return_tuple
    def forward(
        self,
        pixel_values: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        attention_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> HydraClassifierOutput:
        """
        pixel_values: (batch, channels, height, width)
        labels: (batch,) class indices, or what the config's `problem_type` asks for
        """
        inputs = {
            "pixel_values": pixel_values,
            "interpolate_pos_encoding": interpolate_pos_encoding,
            "attention_mask": attention_mask,
        }
        return self.answer(labels, inputs, **kwargs)


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
