"""Attention with rotary positions, windows by the type of a layer, and heads of keys and values
that several queries read."""

from collections import Counter
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from .modeling_hydra import HydraAttention, Layout, Norm


# cos and sin of the rotary angles, (batch or 1, tokens, head_dim) each
RotaryTables = tuple[torch.Tensor, torch.Tensor]


class HydraRotaryAttention(HydraAttention):
    """Queries and keys are turned by the angles of their positions.

    positions: the tables of angles; these and the mask are one for all layers, or given by
        `config.layer_types`. Layers of type "sliding_attention" see `config.attention_window`
        tokens to each side, themselves counted: for backends that know windows, all others go by
            the mask.
    """

    float32_rotary = False  # whether queries and keys are turned in float32

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        layer_types = getattr(config, "layer_types", None)
        self.layer_type = None
        if layer_types is not None:
            self.layer_type = layer_types[layer]
        self.sliding_window = None
        if self.layer_type == "sliding_attention":
            self.sliding_window = config.attention_window

    def forward(self, hidden_states: torch.Tensor, attention_mask=None, first_token_only=False, *positions, **kwargs):
        if self.sliding_window is not None:
            kwargs["sliding_window"] = self.sliding_window
        mask = self.of_layer_type(attention_mask)
        return super().forward(hidden_states, mask, first_token_only, *positions, **kwargs)

    def place(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        layout: Layout,
        tables: RotaryTables | Mapping[str, RotaryTables] | None = None,
    ) -> tuple[torch.Tensor, ...]:
        if tables is not None:
            cos, sin = self.of_layer_type(tables)
            query = rotated(query, cos, sin, self.float32_rotary)
            key = rotated(key, cos, sin, self.float32_rotary)
        return query, key, value

    def of_layer_type(self, entries):
        """Return this layer's entry where there is one for each type of layers, `{type: ...}`."""
        if isinstance(entries, Mapping):
            return entries[self.layer_type]
        return entries


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_float32: bool = False) -> torch.Tensor:
    """Turn queries or keys by the angles of their positions: (rows, heads, tokens, head_dim)

    cos, sin: (batch or 1, tokens, head_dim); rows are a multiple of the batch, and tokens may be
        the first ones alone
    """
    tokens = states.shape[2]
    cos = cos[:, :tokens].unsqueeze(1)
    sin = sin[:, :tokens].unsqueeze(1)
    turned = states
    if in_float32:
        turned = states.float()
    is_per_row = cos.shape[0] > 1
    if is_per_row:
        turned = turned.unflatten(0, (-1, cos.shape[0]))
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    if is_per_row:
        turned = turned.flatten(0, 1)
    return turned.to(states.dtype)  # under autocast the tables have another


def queries_per_kv_head(heads: list[int], queries_per_key: int) -> list[int]:
    """Return how many of these query heads read each of their heads of keys and values."""
    readers = Counter(head // queries_per_key for head in heads)
    return list(readers.values())


def for_each_query(states: torch.Tensor, queries: list[int]) -> torch.Tensor:
    """Repeat heads of keys or values as often as they are read: (rows, heads, ...) -> (rows, sum of
    queries, ...)"""
    if set(queries) == {1}:
        return states
    if len(set(queries)) == 1:
        return states.repeat_interleave(queries[0], dim=1)
    repeated = []
    for head, count in zip(states.split(1, dim=1), queries, strict=True):
        repeated.append(head.expand(-1, count, *head.shape[2:]))
    return torch.cat(repeated, dim=1)
