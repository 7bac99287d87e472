"""The fused attention: the heads of all members in one attention call, and the pieces around it."""

from collections.abc import Callable

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .grouped import GroupedLinear, GroupedOutput, can_join, joint_product
from .kernels import activate


def eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Equations 2 and 3, head by head: (rows, heads, tokens, head_dim) -> (rows, tokens, heads, head_dim)."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    softmax_dtype = torch.float32 if module.float32_softmax else None
    weights = nn.functional.softmax(scores, dim=-1, dtype=softmax_dtype).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class HydraAttention(nn.Module):
    """Multi-head attention of all members at once; member m keeps `kept_heads[m]` of the backbone's heads.

    Attention is computed head by head, so members cannot mix, whichever axis carries them:

    - members on the batch axis, (members * batch, heads, tokens, head_dim), where each keeps as many heads: the
      batched projections come out in this shape;
    - members on the head axis, (batch, heads of all members, tokens, head_dim), where head counts differ or where all
      members still see the same input, which one dense product then projects for all of them.
    """

    def __init__(self, config, kept_heads: list[list[int]], dropout: float, bias: bool, float32_softmax: bool):
        super().__init__()
        self.config = config
        self.num_members = len(kept_heads)
        # The softmax keeps the scale of the backbone's heads, however many are left.
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = dropout
        self.float32_softmax = float32_softmax
        self.is_causal = False

        self.widths = widths = tuple(len(heads) * self.head_dim for heads in kept_heads)
        self.has_no_head = sum(widths) == 0
        self.is_uniform = len(set(widths)) == 1
        self.q_proj = GroupedLinear(config.hidden_size, widths, bias=bias)
        self.k_proj = GroupedLinear(config.hidden_size, widths, bias=bias)
        self.v_proj = GroupedLinear(config.hidden_size, widths, bias=bias)
        self.o_proj = GroupedOutput(widths, config.hidden_size)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        queries: torch.Tensor | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """
        hidden_states: (members or 1, batch, tokens, hidden)
        attention_mask: what `members_mask` returns
        queries: the tokens to attend from where not all are needed, (members or 1, batch, query tokens, hidden)

        Returns (members, batch, query tokens, hidden) and, from the eager backend, the attention weights
        (batch, heads of all members, query tokens, tokens).
        """
        queries = hidden_states if queries is None else queries
        _, batch, tokens, _ = queries.shape
        if self.has_no_head:
            # No member has a head here: all that is left of the attention is its output bias.
            output = self.o_proj(queries.new_zeros(batch, tokens, 0), packed=True)
            is_eager = self.config._attn_implementation == "eager"
            return output, queries.new_zeros(batch, 0, tokens, hidden_states.shape[2]) if is_eager else None

        # Weights that are asked for have to be those that the values are multiplied with: (batch, heads of all members).
        shows_weights = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
        if hidden_states.shape[0] > 1 and self.is_uniform and has_rows(attention_mask) and not shows_weights:
            return self._members_on_batch_axis(hidden_states, attention_mask, queries, **kwargs)
        return self._members_on_head_axis(hidden_states, attention_mask, queries, **kwargs)

    def _members_on_batch_axis(self, hidden_states, attention_mask, queries, **kwargs):
        members, batch, tokens, _ = queries.shape
        query, key, value = self._project(hidden_states, queries, packed=False)
        output, weights = self._attend(query, key, value, attention_mask, **kwargs)
        if weights is not None:
            weights = weights.unflatten(0, (members, batch)).transpose(0, 1).flatten(1, 2)
        return self.o_proj(output.reshape(members, batch, tokens, -1)), weights

    def _members_on_head_axis(self, hidden_states, attention_mask, queries, **kwargs):
        _, batch, tokens, _ = queries.shape
        if isinstance(attention_mask, torch.Tensor):
            attention_mask = attention_mask[:batch]
        query, key, value = self._project(hidden_states, queries, packed=True)
        output, weights = self._attend(query, key, value, attention_mask, **kwargs)
        return self.o_proj(output.reshape(batch, tokens, -1), packed=True), weights

    def _project(self, hidden_states, queries, packed: bool) -> tuple[torch.Tensor, ...]:
        """Query, key and value, (rows, heads, tokens, head_dim) each."""
        if queries is hidden_states:
            return self._heads((self.q_proj, self.k_proj, self.v_proj), hidden_states, packed)
        return (
            *self._heads((self.q_proj,), queries, packed),
            *self._heads((self.k_proj, self.v_proj), hidden_states, packed),
        )

    def _heads(self, projections, states: torch.Tensor, packed: bool) -> tuple[torch.Tensor, ...]:
        tokens = states.shape[2]
        if can_join(projections, states):
            return split_heads(joint_product(projections, states, packed), tokens, len(projections), self.head_dim)
        projected = [projection(states, packed=packed) for projection in projections]
        return tuple(
            states.view(-1, tokens, states.shape[-1] // self.head_dim, self.head_dim).transpose(1, 2)
            for states in projected
        )

    def _attend(self, query, key, value, attention_mask, **kwargs):
        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        return attention_interface(
            self,
            query,
            key,
            value,
            attention_mask,
            dropout=self.attention_dropout if self.training else 0.0,
            scaling=self.scaling,
            **kwargs,
        )


def split_heads(joint: torch.Tensor, tokens: int, projections: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """(..., projections * heads * head_dim), a row per token -> per projection (rows, heads, tokens, head_dim)"""
    heads = joint.shape[-1] // (projections * head_dim)
    return joint.view(-1, tokens, projections, heads, head_dim).permute(2, 0, 3, 1, 4).unbind(0)


class HydraMLP(nn.Module):
    """The transformer's two-layer MLP, on any leading axes."""

    def __init__(self, config):
        super().__init__()
        self.fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.activation_fn = ACT2FN[config.hidden_act]
        self.fc2 = nn.Linear(config.intermediate_size, config.hidden_size)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = hidden_states.shape
        if len(shape) > 3:
            # What stands in for a linear layer (8-bit ones, for instance) may know three axes at most.
            hidden_states = hidden_states.flatten(0, -3)
        hidden_states = self.fc1(hidden_states)
        if self.fc1._forward_hooks:
            hidden_states = self.activation_fn(hidden_states)  # whoever hooked the layer may keep what it gave
        else:
            hidden_states = activate(self.activation_fn, hidden_states)
        return self.fc2(hidden_states).reshape(shape)


def encoder_mask(config: PreTrainedConfig, embeddings: torch.Tensor, attention_mask, num_members: int):
    """What an encoder's attention reads of its `attention_mask`, for embeddings (1 or members, batch, tokens, hidden).

    Without a mask none is made: under `torch.compile` older versions of Transformers make one that masks nothing, which
    keeps the attention from its fastest kernels.
    """
    if attention_mask is None:
        return None
    mask = create_bidirectional_mask(config=config, inputs_embeds=embeddings[0], attention_mask=attention_mask)
    return members_mask(mask, embeddings.shape[1], num_members)


def members_mask(attention_mask, batch: int, num_members: int):
    """Repeats a mask made for the batch over the members: (batch or 1, ...) -> (members * batch, ...).

    Its first `batch` rows are the mask it was made from, for attention with the members on the head axis. Masks that
    are no tensors (flex attention's block masks) and absent ones stay as they are.
    """
    if not isinstance(attention_mask, torch.Tensor):
        return attention_mask
    if attention_mask.dim() == 4 and attention_mask.shape[1] != 1:
        raise ValueError(
            f"attention_mask has {attention_mask.shape[1]} heads: members have other heads each, pass a mask of shape "
            "(batch, tokens) or (batch, 1, tokens, tokens)"
        )
    if attention_mask.shape[0] != batch:
        attention_mask = attention_mask.expand(batch, *attention_mask.shape[1:])
    return attention_mask.repeat(num_members, *[1] * (attention_mask.dim() - 1)) if num_members > 1 else attention_mask


def has_rows(attention_mask) -> bool:
    """Whether a mask can be repeated over members and cut to query tokens: flex attention's block masks cannot."""
    return attention_mask is None or isinstance(attention_mask, torch.Tensor)


def mask_of_first_token(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The rows of the first query token: (rows, 1, tokens, tokens) -> (rows, 1, 1, tokens); 2-D masks have none."""
    if attention_mask is None or attention_mask.dim() == 2:
        return attention_mask
    return attention_mask[:, :, :1]
