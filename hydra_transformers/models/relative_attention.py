"""Attention with a bias of positions."""

import torch
from torch import nn

from .modeling_hydra import HydraAttention


BACKENDS_WITH_BIAS = ("eager", "sdpa")  # they add a mask of numbers, which may differ between heads


class HydraBiasAttention(HydraAttention):
    """Adds to the scores what a family's `bias` gives, (batch or 1, heads of all members, query
    tokens, tokens)."""

    adds_bias = True

    def add_bias(
        self,
        attention_mask: torch.Tensor | None,
        hidden_states: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        *positions,
    ) -> torch.Tensor:
        """Return a mask to be added to the scores, (batch or 1, heads of all members, query tokens,
        tokens)."""
        if self.config._attn_implementation not in BACKENDS_WITH_BIAS:
            raise ValueError(
                f"the attention backend is {self.config._attn_implementation!r}, which cannot add a bias of "
                f"positions: use {' or '.join(map(repr, BACKENDS_WITH_BIAS))}"
            )
        bias = self.bias(hidden_states, query, key, *positions)
        if attention_mask is None:
            return bias
        if attention_mask.dtype == torch.bool:
            return torch.where(attention_mask, bias, torch.finfo(bias.dtype).min)
        return attention_mask + bias


class HydraTableBiasAttention(HydraBiasAttention):
    """The bias is a number for each head of the backbone and pair of tokens, from one table for all
    layers.

    positions: (heads of the backbone, tokens, tokens), perhaps with members in front, of which each
        layer reads the heads that it keeps
    """

    def bias(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, position_bias: torch.Tensor
    ) -> torch.Tensor:
        queries = query.shape[2]  # the first token alone, where only it is computed
        by_member = position_bias[..., :queries, :].expand(self.num_members, *[-1] * 3)
        by_head = [heads_of_member.unbind() for heads_of_member in by_member]
        kept = []
        for bias_of_heads, heads in zip(by_head, self.kept_heads, strict=True):
            kept += [bias_of_heads[head] for head in heads]
        return torch.stack(kept).unsqueeze(0)


class PositionBias(nn.Embedding):
    """What distances add to the scores of each of the backbone's heads; weight (numbers of
    distances, heads)."""

    def forward(self, distances: torch.Tensor) -> torch.Tensor:
        """(tokens, tokens) -> (heads, tokens, tokens)"""
        return super().forward(distances).permute(2, 0, 1)
