"""The fused attention: the heads of all members in one attention call, and the masks it reads."""

from collections import Counter
from collections.abc import Callable, Mapping

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.masking_utils import create_bidirectional_mask, create_bidirectional_sliding_window_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .grouped import GroupedLinear, GroupedOutput


# Those that add a mask of numbers to the scores, with other numbers for each head.
BACKENDS_WITH_BIAS = ("eager", "sdpa")

# cos and sin of every angle that queries and keys are turned by, (batch or 1, tokens, head_dim) each; or such a pair for
# each type of layers that `config.layer_types` names.
RotaryTables = tuple[torch.Tensor, torch.Tensor]


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
    if softmax_dtype is not None and scores.dtype == torch.float64:
        # The mask's smallest float64 would become -inf in float32, and a row that sees only padding NaN.
        scores = scores.clamp(min=torch.finfo(torch.float32).min)
    weights = nn.functional.softmax(scores, dim=-1, dtype=softmax_dtype).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class HydraAttention(nn.Module):
    """Multi-head attention of all members at once; member m keeps `kept_heads[m]` of the backbone's heads.

    A member's queries, keys and values lie below each other in `qkv_proj`, so that its three projections are one
    product. Where several query heads read one head of keys and values (grouped queries), heads are the query heads; a head
    of keys and values is there as long as one of its query heads is, and is computed once for all of these. Attention
    itself is computed head by head, so members cannot mix, whichever axis carries them:

    - members on the batch axis, (members * batch, heads, tokens, head_dim), where each keeps as many heads (for each head
      of keys and values): the products come out in this shape;
    - members on the head axis, (batch, heads of all members, tokens, head_dim), where head counts differ, where the
      mask cannot be repeated over members, where positions have a bias, which need not be repeated over the batch then,
      and for the eager backend, which returns its weights in this shape.
    """

    def __init__(self, config: PreTrainedConfig, layer: int):
        super().__init__()
        anatomy, kept_heads = config.anatomy, config.kept_heads[layer][: config.members_in(layer)]
        self.config, self.layer, self.kept_heads = config, layer, kept_heads
        self.num_members, self.is_trunk = len(kept_heads), layer < config.trunk_layers
        # The softmax keeps the scale of the backbone's heads, however many are left.
        self.head_dim = anatomy.head_dim or config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = anatomy.attention_dropout
        self.float32_softmax = anatomy.float32_softmax
        self.float32_rotary = anatomy.float32_rotary
        self.is_causal = False
        layer_types = getattr(config, "layer_types", None)
        self.layer_type = None if layer_types is None else layer_types[layer]
        self.sliding_window = anatomy.sliding_window if self.layer_type == "sliding_attention" else None

        self.widths = [len(heads) * self.head_dim for heads in kept_heads]  # of each member's heads together
        self.queries_per_key = anatomy.queries_per_key
        # How many query heads read each head of keys and values, of every member.
        self.readers = [readers_of(heads, self.queries_per_key) for heads in kept_heads]
        qkv_widths = [self.head_dim * (sum(each) + 2 * len(each)) for each in self.readers]
        self.qkv_proj = GroupedLinear(config.hidden_size, qkv_widths, anatomy.qkv_bias)
        self.o_proj = GroupedOutput(self.widths, config.hidden_size, anatomy.output_bias)
        self.register_buffer("kept_heads_mask", mask_of(kept_heads, config.num_attention_heads))

    @property
    def is_uniform(self) -> bool:
        return len(set(self.widths)) == 1

    @property
    def has_equal_members(self) -> bool:
        """Whether members keep equally many heads, and equally many for each head of keys and values."""
        return all(each == self.readers[0] for each in self.readers)

    @property
    def has_no_head(self) -> bool:
        return not any(self.widths)

    def check_same_heads(self, saved: torch.Tensor) -> None:
        """Refuses weights that were saved for other heads than the config names: `saved` is their `kept_heads_mask`."""
        if saved.is_meta:
            return  # nothing was loaded
        found = [[head for head, is_kept in enumerate(heads) if is_kept] for heads in saved.tolist()]
        if found == self.kept_heads:
            return
        where = "another number of members"
        if len(found) == len(self.kept_heads):
            member = next(m for m, heads in enumerate(found) if heads != self.kept_heads[m])
            where = f"layer {self.layer}, member {member}: {found[member]} saved, {self.kept_heads[member]} named"
        raise ValueError(
            f"the weights were saved for other heads than config.kept_heads names ({where}): use the config.json that was "
            "saved with them"
        )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.check_same_heads(state_dict.setdefault(f"{prefix}kept_heads_mask", self.kept_heads_mask))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        first_token_only: bool = False,
        position_bias: torch.Tensor | None = None,
        position_embeddings: RotaryTables | Mapping[str, RotaryTables] | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the heads give, before the output projection, which the layer calls.

        hidden_states: (members or 1, batch, tokens, hidden)
        attention_mask: what `members_mask` returns, for all layers or by `config.layer_types`
        first_token_only: let only the first token ask
        position_bias: what is added to the scores, (members or 1, heads of the backbone, tokens, tokens)
        position_embeddings: the tables of rotary positions, for all layers or by `config.layer_types`

        Returns (members, batch, query tokens, width) or, where members keep different numbers of heads, (batch, query
        tokens, sum of widths); and from the eager backend the attention weights (batch, heads of all members, query
        tokens, tokens).
        """
        attention_mask, is_eager = self.of_layer(attention_mask), self.config._attn_implementation == "eager"
        _, batch, tokens, _ = hidden_states.shape
        if self.has_no_head:
            queries = 1 if first_token_only else tokens
            weights = hidden_states.new_zeros(batch, 0, queries, tokens) if is_eager else None
            return hidden_states.new_zeros(self.num_members, batch, queries, 0), weights
        if first_token_only:
            attention_mask = mask_of_first_token(attention_mask)
        on_batch_axis = self.has_equal_members and has_rows(attention_mask) and not is_eager
        on_batch_axis = on_batch_axis and (position_bias is None or self.num_members == 1)
        if isinstance(attention_mask, torch.Tensor) and (self.is_trunk or not on_batch_axis):
            attention_mask = attention_mask[:batch]
        if position_bias is not None:
            position_bias = position_bias[:, :, :1] if first_token_only else position_bias
            attention_mask = self._mask_with_bias(attention_mask, position_bias)

        attention_interface: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        dropout = self.attention_dropout if self.training else 0.0
        if self.sliding_window is not None:
            kwargs["sliding_window"] = self.sliding_window
        query, key, value = self._project(hidden_states, first_token_only, on_batch_axis)
        if position_embeddings is not None:
            tables = self.of_layer(position_embeddings)
            query, key = (rotated(states, *tables, self.float32_rotary) for states in (query, key))
        if self.queries_per_key > 1:
            readers = self.readers[0] if on_batch_axis else [count for each in self.readers for count in each]
            key, value = for_each_query(key, readers), for_each_query(value, readers)
        output, weights = attention_interface(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        if on_batch_axis:
            return output.reshape(self.num_members, -1, output.shape[1], self.widths[0]), weights
        output = output.flatten(2)
        if self.is_uniform:
            output = output.unflatten(-1, (self.num_members, -1)).movedim(-2, 0)
        return output, weights

    def _mask_with_bias(self, attention_mask: torch.Tensor | None, position_bias: torch.Tensor) -> torch.Tensor:
        """A mask to be added to the scores, (batch or 1, heads of all members, query tokens, tokens)."""
        if self.config._attn_implementation not in BACKENDS_WITH_BIAS:
            raise ValueError(
                f"the attention backend is {self.config._attn_implementation!r}, which cannot add a bias of positions: "
                f"use {' or '.join(map(repr, BACKENDS_WITH_BIAS))}"
            )
        by_head = [of_member.unbind() for of_member in position_bias.expand(self.num_members, -1, -1, -1)]
        kept = [by_head[member][head] for member, heads in enumerate(self.kept_heads) for head in heads]
        bias = torch.stack(kept).unsqueeze(0)
        if attention_mask is None:
            return bias
        if attention_mask.dtype == torch.bool:
            return torch.where(attention_mask, bias, torch.finfo(bias.dtype).min)
        return attention_mask + bias

    def of_layer(self, given):
        """This layer's own of what is given for each type of layers, `{type: ...}`; anything else is for all of them."""
        return given[self.layer_type] if isinstance(given, Mapping) else given

    def _project(
        self, hidden_states: torch.Tensor, first_token_only: bool, on_batch_axis: bool
    ) -> tuple[torch.Tensor, ...]:
        """Query (of the first token, where only it asks), key and value, (rows, heads, tokens, head_dim) each. Of key and value
        each head once, however many queries read it."""

        def heads(projected, projections: int) -> tuple[torch.Tensor, ...]:
            """(members, batch, tokens, projections * width), or a tuple over members -> `projections` of them"""
            if on_batch_axis:
                return split_heads(projected.flatten(0, 1), projections, self.head_dim)
            by_member = [of_member.unflatten(-1, (projections, -1, self.head_dim)) for of_member in projected]
            return torch.cat(by_member, dim=-2).permute(2, 0, 3, 1, 4).unbind(0)

        if not first_token_only and self.queries_per_key == 1:
            return heads(self.qkv_proj(hidden_states), 3)
        queries = [slice(width) for width in self.widths]
        keys_and_values = [slice(width, None) for width in self.widths]
        if first_token_only:
            return (
                *heads(self.qkv_proj(hidden_states[:, :, :1], queries), 1),
                *heads(self.qkv_proj(hidden_states, keys_and_values), 2),
            )
        joint, widths = self.qkv_proj(hidden_states), [width for width in self.widths if width]
        if on_batch_axis:
            return *heads(joint[..., : widths[0]], 1), *heads(joint[..., widths[0] :], 2)
        by_member = list(zip(joint, widths, strict=True))
        return (
            *heads([of_member[..., :width] for of_member, width in by_member], 1),
            *heads([of_member[..., width:] for of_member, width in by_member], 2),
        )


def keys_of(heads: list[int], queries_per_key: int) -> list[int]:
    """The heads of keys and values that query heads read, in ascending order."""
    return list(dict.fromkeys(head // queries_per_key for head in heads))


def readers_of(heads: list[int], queries_per_key: int) -> list[int]:
    """How many of these query heads read each of their heads of keys and values."""
    return list(Counter(head // queries_per_key for head in heads).values())


def for_each_query(states: torch.Tensor, readers: list[int]) -> torch.Tensor:
    """Heads of keys or values as often as they are read: (rows, heads, ...) -> (rows, sum of readers, ...)"""
    if len(set(readers)) == 1:
        return states if readers[0] == 1 else states.repeat_interleave(readers[0], dim=1)
    return torch.cat(
        [
            states[:, head : head + 1].expand(-1, count, *[-1] * (states.dim() - 2))
            for head, count in enumerate(readers)
        ],
        dim=1,
    )


def mask_of(kept_heads: list[list[int]], num_heads: int) -> torch.Tensor:
    """A layer's kept heads as ones and zeros, (members, heads of the backbone)."""
    rows = [[int(head in heads) for head in range(num_heads)] for heads in kept_heads]
    return torch.tensor(rows, dtype=torch.uint8)


def split_heads(joint: torch.Tensor, projections: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """(rows, tokens, projections * heads * head_dim) -> per projection (rows, heads, tokens, head_dim)"""
    return joint.unflatten(-1, (projections, -1, head_dim)).permute(2, 0, 3, 1, 4).unbind(0)


def rotated(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, in_float32: bool = False) -> torch.Tensor:
    """Queries or keys turned by the angles of their positions, of any number of heads: (rows, heads, tokens, head_dim)

    cos, sin: (batch or 1, tokens, head_dim), of which queries that are fewer than the tokens take the first. Rows are the
        batch as often as members, or candidates for pruning, lie on the batch axis; the tables need not be repeated
    """
    cos, sin = (table[:, : states.shape[2]].unsqueeze(1) for table in (cos, sin))
    turned = states.float() if in_float32 else states
    is_per_row = cos.shape[0] > 1
    if is_per_row:
        turned = turned.unflatten(0, (-1, cos.shape[0]))
    first, second = turned.chunk(2, dim=-1)
    turned = turned * cos + torch.cat((-second, first), dim=-1) * sin
    # Of the values' dtype again, which under autocast is not the tables'.
    return (turned.flatten(0, 1) if is_per_row else turned).to(states.dtype)


def encoder_mask(config: PreTrainedConfig, embeddings: torch.Tensor, attention_mask):
    """What an encoder's attention reads of its `attention_mask`, for embeddings (1 or members, batch, tokens, hidden)."""
    if attention_mask is None:
        return None  # and not one that masks nothing, which would keep the attention from its fastest kernels
    mask = create_bidirectional_mask(config=config, inputs_embeds=embeddings[0], attention_mask=attention_mask)
    return members_mask(mask, embeddings.shape[1], config.num_members)


def sliding_mask(config: PreTrainedConfig, embeddings: torch.Tensor, attention_mask):
    """The same for layers whose tokens see no further than `config.sliding_window` to each side."""
    mask = create_bidirectional_sliding_window_mask(
        config=config, inputs_embeds=embeddings[0], attention_mask=attention_mask
    )
    return members_mask(mask, embeddings.shape[1], config.num_members)


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
    return repeated_mask(attention_mask, num_members)


def repeated_mask(attention_mask, times: int):
    """A mask for its rows that often, one after the other, and of several by type of layers each of them."""
    if isinstance(attention_mask, Mapping):
        return {layer_type: repeated_mask(mask, times) for layer_type, mask in attention_mask.items()}
    if attention_mask is None or times == 1:
        return attention_mask
    return attention_mask.repeat(times, *[1] * (attention_mask.dim() - 1))


def has_rows(attention_mask) -> bool:
    """Whether a mask can be repeated over members and cut to query tokens: flex attention's block masks cannot."""
    if isinstance(attention_mask, Mapping):
        return all(map(has_rows, attention_mask.values()))
    return attention_mask is None or isinstance(attention_mask, torch.Tensor)


def mask_of_first_token(attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """The rows of the first query token: (rows, 1, tokens, tokens) -> (rows, 1, 1, tokens); 2-D masks have none."""
    if attention_mask is None or attention_mask.dim() == 2:
        return attention_mask
    return attention_mask[:, :, :1]
