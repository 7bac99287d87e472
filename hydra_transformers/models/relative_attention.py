"""Attention with a bias of positions, from one table for all layers."""

import torch

from .modeling_hydra import HydraAttention


class HydraBiasedAttention(HydraAttention):
    """A number for each head of the backbone and pair of tokens is added to the scores.

    positions: (members or 1, 1, heads of the backbone, tokens, tokens), of which each layer takes the heads that it keeps
    """

    adds_bias = True

    def bias(
        self, hidden_states: torch.Tensor, query: torch.Tensor, key: torch.Tensor, position_bias: torch.Tensor
    ) -> torch.Tensor:
        queries = query.shape[2]  # the first token alone, where only it is computed
        by_member = position_bias[..., :queries, :].expand(self.num_members, -1, -1, -1, -1)
        by_head = [heads_of_member.unbind(1) for heads_of_member in by_member]
        kept = [by_head[member][head] for member, heads in enumerate(self.kept_heads) for head in heads]
        return torch.stack(kept, dim=1)
