"""The fused Transformer layer, the same for every family: its anatomy says what it is made of.

The states are (members, batch, tokens, hidden) throughout: the paper's reshapes between MT x d and T x Md are its views.
"""

from functools import partial

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention import HydraAttention
from .configuration_hydra import Anatomy
from .grouped import of_members
from .norms import norm_of


class HydraMLP(nn.Module):
    """The transformer's two-layer MLP, on any leading axes; with a gate, `fc1` gives it and below it what passes through."""

    def __init__(self, hidden_size: int, inner_size: int, anatomy: Anatomy):
        super().__init__()
        self.has_gate = anatomy.gated_mlp
        self.fc1 = nn.Linear(hidden_size, 2 * inner_size if self.has_gate else inner_size, anatomy.mlp_bias)
        self.activation_fn = ACT2FN[anatomy.activation]
        self.dropout = None if anatomy.inner_dropout is None else nn.Dropout(anatomy.inner_dropout)
        self.fc2 = nn.Linear(inner_size, hidden_size, anatomy.mlp_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = hidden_states.shape
        if len(shape) > 3:
            # What stands in for a linear layer (8-bit ones, for instance) may know three axes at most.
            hidden_states = hidden_states.flatten(0, -3)
        inner = self.fc1(hidden_states)
        if self.has_gate:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.activation_fn(gate) * inner
        else:
            inner = self.activation_fn(inner)
        inner = inner if self.dropout is None else self.dropout(inner)
        return self.fc2(inner).reshape(shape)


class HydraLayer(GradientCheckpointingLayer):
    """One Transformer layer of all members, or of one in the trunk: `heads`, then `complete`."""

    def __init__(self, config: PreTrainedConfig, layer: int):
        super().__init__()
        anatomy = config.anatomy
        self.norm_first, self.drop_path = anatomy.norm_first, anatomy.drop_path

        norm = partial(norm_of, anatomy, config.hidden_size)
        sizes = iter(config.mlp_sizes(layer))  # members are built in their order
        has_attention_norm = layer > 0 or anatomy.first_attention_norm
        self.attention_norm = of_members(config, "layernorm", norm, layer) if has_attention_norm else nn.Identity()
        self.attention = HydraAttention(config, layer)
        self.mlp_norm = of_members(config, "layernorm", norm, layer)
        self.mlp = of_members(config, "mlp", lambda: HydraMLP(config.hidden_size, next(sizes), anatomy), layer)
        self.output_dropout = None if anatomy.output_dropout is None else nn.Dropout(anatomy.output_dropout)
        self.mlp_dropout = None if anatomy.mlp_dropout is None else nn.Dropout(anatomy.mlp_dropout)

    def __call__(self, hidden_states, attention_mask=None, first_token_only=False, position_bias=None, **kwargs):
        # Gradient checkpoints know as inputs, to which gradients flow, what has no name.
        return super().__call__(hidden_states, attention_mask, first_token_only, position_bias, **kwargs)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask=None,
        first_token_only: bool = False,
        position_bias: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden)"""
        heads = self.heads(hidden_states, attention_mask, first_token_only, position_bias=position_bias, **kwargs)
        return self.complete(hidden_states, heads, first_token_only)

    def heads(
        self, hidden_states: torch.Tensor, attention_mask=None, first_token_only: bool = False, **kwargs
    ) -> torch.Tensor:
        """Equations 4 and 5, what the output projection reads: `HydraAttention.forward`'s first result."""
        normed = self.attention_norm(hidden_states) if self.norm_first else hidden_states
        return self.attention(normed, attention_mask, first_token_only, **kwargs)[0]

    def complete(
        self, hidden_states: torch.Tensor, heads: torch.Tensor, first_token_only: bool = False
    ) -> torch.Tensor:
        """Equations 6 and 7, the layer after its heads.

        hidden_states: what `heads` got, (members or 1, ..., tokens, hidden)
        heads: what it gave; of members that keep equally many heads (members, ..., tokens or 1, width), where it may
            have further axes in front of the tokens

        Returns (members, ..., tokens or 1, hidden).
        """
        if first_token_only:
            hidden_states = hidden_states[..., :1, :]
        hidden_states = hidden_states + self._dropped(self.attention.o_proj(heads), self.output_dropout)
        if self.norm_first:
            return hidden_states + self._dropped(self.mlp(self.mlp_norm(hidden_states)), self.mlp_dropout)
        hidden_states = self.attention_norm(hidden_states)
        return self.mlp_norm(hidden_states + self._dropped(self.mlp(hidden_states), self.mlp_dropout))

    def _dropped(self, branch: torch.Tensor, dropout: nn.Dropout | None) -> torch.Tensor:
        """Dropout, and stochastic depth: in training a branch is left out for a sample of a member."""
        branch = branch if dropout is None else dropout(branch)
        if not self.training or not self.drop_path:
            return branch
        keep = 1 - self.drop_path
        mask = branch.new_empty(*branch.shape[:2], *[1] * (branch.dim() - 2)).bernoulli_(keep)
        return branch * (mask / keep)


def hydra_layers(config: PreTrainedConfig) -> nn.ModuleList:
    return nn.ModuleList(HydraLayer(config, layer) for layer in range(config.num_hidden_layers))
