"""Attention with rotary positions, windows by the type of a layer, and heads of keys and values that several queries read."""

from collections import Counter
from collections.abc import Mapping

import torch
from transformers import PreTrainedConfig

from .modeling_hydra import HydraAttention, Layout, Norm


# cos and sin of the rotary angles, (batch or 1, tokens, head_dim) each
RotaryTables = tuple[torch.Tensor, torch.Tensor]


class HydraRotaryAttention(HydraAttention):
    """Queries and keys are turned by the angles of their positions.

    positions: the tables of angles; these and the mask are one for all layers, or given by `config.layer_types`. Layers of
        type "sliding_attention" see `config.attention_window` tokens to each side, themselves counted: for backends that
        know windows, all others go by the mask.
    """

    float32_rotary = False  # whether queries and keys are turned in float32

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm):
        super().__init__(config, layer, norm)
        layer_types = getattr(config, "layer_types", None)
        self.layer_type = None if layer_types is None else layer_types[layer]
        self.sliding_window = config.attention_window if self.layer_type == "sliding_attention" else None

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
            tables = self.of_layer_type(tables)
            query, key = (rotated(states, *tables, self.float32_rotary) for states in (query, key))
        return query, key, value

    def of_layer_type(self, entries):
        """This layer's entry where there is one for each type of layers, `{type: ...}`."""
        return entries[self.layer_type] if isinstance(entries, Mapping) else entries


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_float32: bool = False) -> torch.Tensor:
    """Queries or keys turned by the angles of their positions: (rows, heads, tokens, head_dim)

    cos, sin: (batch or 1, tokens, head_dim); rows are a multiple of the batch, and tokens may be the first ones alone
    """
    cos, sin = (table[:, : states.shape[2]].unsqueeze(1) for table in (cos, sin))
    turned = states.float() if in_float32 else states
    is_per_row = cos.shape[0] > 1
    if is_per_row:
        turned = turned.unflatten(0, (-1, cos.shape[0]))
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    return (turned.flatten(0, 1) if is_per_row else turned).to(states.dtype)  # under autocast the tables have another


def queries_per_kv_head(heads: list[int], queries_per_key: int) -> list[int]:
    """How many of these query heads read each of their heads of keys and values."""
    return list(Counter(head // queries_per_key for head in heads).values())


def for_each_query(states: torch.Tensor, queries: list[int]) -> torch.Tensor:
    """Heads of keys or values as often as they are read: (rows, heads, ...) -> (rows, sum of queries, ...)"""
    if len(set(queries)) == 1:
        return states if queries[0] == 1 else states.repeat_interleave(queries[0], dim=1)
    heads = zip(states.split(1, dim=1), queries, strict=True)
    return torch.cat([head.expand(-1, count, *head.shape[2:]) for head, count in heads], dim=1)
