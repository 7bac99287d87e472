"""Heads in the packed weights of one member: which rows of q, k, v and of the output projection are
whose.

A member's queries, keys and values lie below each other. Where several query heads read one key
and value head, that head is stored once, and stays as long as one of its query heads does.
"""

from collections.abc import Sequence

import torch

from ..models.modeling_hydra import HydraAttention
from ..models.rotary_attention import for_each_query


def keys_of(heads: Sequence[int], queries_per_key: int) -> list[int]:
    """Return the heads of keys and values that query heads read, in ascending order."""
    keys = [head // queries_per_key for head in heads]
    return list(dict.fromkeys(keys))


def heads_at(
    tensor: torch.Tensor, positions: Sequence[int | None], head_dim: int, projections: int = 1
) -> torch.Tensor:
    """Return the rows of the heads at `positions`, of each projection; None gives a head of zeros.

    (projections * heads * head_dim, ...) -> (projections * positions * head_dim, ...)
    """
    heads = tensor.unflatten(0, (projections, -1, head_dim))
    if None in positions:
        zeros = heads.new_zeros(projections, 1, *heads.shape[2:])
        heads = torch.cat([heads, zeros], dim=1)
        last = heads.shape[1] - 1
        positions = [last if position is None else position for position in positions]
    index = torch.tensor(positions, dtype=torch.long, device=tensor.device)
    return heads.index_select(1, index).flatten(0, 2)


def places(heads: Sequence[int], among: Sequence[int]) -> list[int | None]:
    """Return where each of `heads` lies in the list `among`; None for those that it does not
    have."""
    return [among.index(head) if head in among else None for head in heads]


def qkv_rows(
    tensor: torch.Tensor, before: Sequence[int], after: Sequence[int], attention: HydraAttention
) -> torch.Tensor:
    """Return the rows of the heads `after` in q, k and v, which have those of the heads `before`:
    (rows, ...) -> (other rows, ...)"""
    per_key = attention.config.queries_per_key
    head_dim = attention.head_dim
    query, keys_and_values = tensor.tensor_split([len(before) * head_dim])

    query_positions = places(after, before)
    key_positions = places(keys_of(after, per_key), keys_of(before, per_key))
    query = heads_at(query, query_positions, head_dim)
    keys_and_values = heads_at(keys_and_values, key_positions, head_dim, projections=2)
    return torch.cat([query, keys_and_values])


def qkv_by_head(tensor: torch.Tensor, attention: HydraAttention) -> torch.Tensor:
    """Return q, k and v head by head, each with the key and value that it reads:
    (rows, ...) -> (3, heads, head_dim, ...)"""
    if attention.config.queries_per_key == 1:
        return tensor.unflatten(0, (3, -1, attention.head_dim))
    queries = attention.queries_per_kv_head[0]
    heads = tensor.unflatten(0, (-1, attention.head_dim))
    query, keys_and_values = heads.tensor_split([sum(queries)])
    keys_and_values = keys_and_values.unflatten(0, (2, -1))
    return torch.cat([query.unsqueeze(0), for_each_query(keys_and_values, queries)])
