"""A fused transformer from top to bottom, in the order of the paper (arXiv 2510.18358): packed
linear maps, attention (equations 4 and 5), output projection and MLP (6 and 7), the encoder, and
the classifier with the ensemble's prediction (2).

Hidden states are (members, batch, tokens, hidden) throughout. Each member's part is one contiguous
block, so grouped products, attention over (members * batch) and shared layers over all rows copy
nothing. A leading 1 means equal for all members: the embeddings that they share, and the trunk, the
first `config.trunk_layers` layers, which run once as those of one member.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput, logging

from .configuration_hydra import LayerSpec, set_problem_type
from .ensembling import is_exporting
from .task import Task, task_of_config


logger = logging.get_logger(f"transformers.{__name__}")

ROWS_FOR_ONE_PRODUCT_PER_MEMBER = 2048  # per member; below, one batched product is faster

Norm = Callable[[int], nn.Module]  # from the width of the states to a new norm


# Linear maps of several members


class Grouped(nn.Module):
    """Base of the packed layers: member m owns the next `widths[m]` rows of `weight`."""

    def __init__(self, widths: Sequence[int], columns: int, bias_shape: tuple[int, ...] | None):
        super().__init__()
        self.set_widths(widths)
        self.columns = columns
        self.weight = nn.Parameter(torch.empty(sum(widths), columns))
        bias = None
        if bias_shape is not None:
            bias = nn.Parameter(torch.empty(bias_shape))
        self.register_parameter("bias", bias)

    def set_widths(self, widths: Sequence[int]) -> None:
        """Set how many rows each member owns."""
        self.widths = list(widths)
        self.is_uniform = len(set(widths)) == 1
        self.members_with_rows = [m for m, width in enumerate(self.widths) if width > 0]
        self.widths_above_zero = [self.widths[m] for m in self.members_with_rows]


class GroupedLinear(Grouped):
    """M linear maps `in_features -> widths[m]`; weight (sum of widths, in_features), bias (sum of
    widths)."""

    # False where the rows are [queries; keys; values], and the keys' bias stays as it is.
    trains_key_bias = True

    def __init__(self, in_features: int, widths: Sequence[int], bias: bool = True):
        bias_shape = (sum(widths),) if bias else None
        super().__init__(widths, in_features, bias_shape)

    def forward(
        self, hidden_states: torch.Tensor, rows: Sequence[slice] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """(members or 1, ..., in_features) -> (members, ..., width); where widths differ a tuple of
        (..., width), one for each member that has any rows.

        rows: for each member, which of its rows of `weight` to multiply by; all of them by default
        """
        members = len(self.widths)
        weight = self.weight
        bias = self.bias
        if not self.trains_key_bias and torch.is_grad_enabled():
            bias = with_fixed_key_bias(bias, self.widths)

        # One member, as in the trunk: a plain linear layer.
        if members == 1:
            if rows is not None:
                weight = weight[rows[0]]
                if bias is not None:
                    bias = bias[rows[0]]
            return nn.functional.linear(hidden_states, weight, bias)

        # All members alike: one grouped product.
        if hidden_states.shape[0] < members:
            hidden_states = hidden_states.expand(members, *hidden_states.shape[1:])
        if self.is_uniform and (rows is None or all(part == rows[0] for part in rows)):
            weight = weight.view(members, -1, self.columns)
            if bias is not None:
                bias = bias.view(members, 1, -1)
            if rows is not None:
                weight = weight[:, rows[0]]
                if bias is not None:
                    bias = bias[..., rows[0]]
            return grouped_product(hidden_states, weight.transpose(1, 2), bias)

        # Member by member, those without rows left out.
        weights = weight.split(self.widths_above_zero)
        biases = [None] * len(weights)
        if bias is not None:
            biases = bias.split(self.widths_above_zero)
        products = []
        for m, member_weight, member_bias in zip(self.members_with_rows, weights, biases, strict=True):
            if rows is not None:
                member_weight = member_weight[rows[m]]
                if member_bias is not None:
                    member_bias = member_bias[rows[m]]
            products.append(nn.functional.linear(hidden_states[m], member_weight, member_bias))
        return tuple(products)


def with_fixed_key_bias(bias: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """Return the packed biases of queries, keys and values, with no gradient for those of the keys:
    (sum of widths)"""
    parts = []
    for of_member in bias.split(list(widths)):
        query, key, value = of_member.tensor_split(3)
        parts += [query, key.detach(), value]
    return torch.cat(parts)


class GroupedOutput(Grouped):
    """M linear maps `widths[m] -> out_features`; weight (sum of widths, out_features), bias
    (members, out_features)."""

    def __init__(self, widths: Sequence[int], out_features: int, bias: bool = True):
        bias_shape = (len(widths), out_features) if bias else None
        super().__init__(widths, out_features, bias_shape)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(members, ..., width), or where widths differ (..., sum of widths) -> (members, ...,
        out_features)"""
        members = len(self.widths)
        bias = self.bias

        # One member, as in the trunk: a plain linear layer.
        if members == 1 and self.widths[0]:
            if bias is not None:
                bias = bias[0]
            return nn.functional.linear(hidden_states, self.weight.t(), bias)

        # All members alike: one grouped product.
        if self.is_uniform and self.widths[0]:
            weight = self.weight.view(members, -1, self.columns)
            if bias is not None:
                bias = bias.unsqueeze(1)
            return grouped_product(hidden_states, weight, bias)

        # Member by member.
        biases = [None] * members
        if bias is not None:
            biases = bias
        outputs = {}
        if self.members_with_rows:
            states = hidden_states.split(self.widths_above_zero, -1)
            weights = self.weight.split(self.widths_above_zero)
            for m, member_states, weight in zip(self.members_with_rows, states, weights, strict=True):
                outputs[m] = nn.functional.linear(member_states, weight.t(), biases[m])
            like = outputs[self.members_with_rows[0]]
        else:
            like = hidden_states.new_zeros(*hidden_states.shape[1:-1], self.columns)

        # Members without heads get their bias alone: many exported formats fail on products of
        # width zero.
        for m, width in enumerate(self.widths):
            if width == 0 and biases[m] is None:
                outputs[m] = torch.zeros_like(like)
            elif width == 0:
                outputs[m] = biases[m].expand_as(like).type_as(like)
        return torch.stack([outputs[m] for m in range(members)])


def grouped_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Multiply each member's rows: (members, ..., in) x (members, in, out) + (members, 1, out) ->
    (members, ..., out).

    With few rows one batched product; with many one per member, which adds the bias inside the
    product, where a batched one first writes it over the whole output.
    """
    shape = (*inputs.shape[:-1], weight.shape[-1])
    inputs = inputs.flatten(1, -2)
    members, rows, _ = inputs.shape
    # An exported graph serves batches of every size, so no size may decide on it.
    if not is_exporting() and rows >= ROWS_FOR_ONE_PRODUCT_PER_MEMBER:
        biases = [None] * members
        if bias is not None:
            biases = bias.squeeze(1)
        products = [nn.functional.linear(inputs[m], weight[m].t(), biases[m]) for m in range(members)]
        product = torch.stack(products)
    elif bias is None:
        product = torch.bmm(inputs, weight)
    elif torch.compiler.is_compiling():
        product = torch.bmm(inputs, weight) + bias  # a compiler adds it in the pass that comes next
    else:
        product = torch.baddbmm(bias, inputs, weight)
    return product.view(shape)


class PerMember(nn.ModuleList):
    """One module per member, for a part that members do not share."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(members or 1, ...) -> (members, ...), member m through module m."""
        states = hidden_states.expand(len(self), *hidden_states.shape[1:]).unbind()
        outputs = [module(part) for module, part in zip(self, states, strict=True)]
        return torch.stack(outputs)


class EmbeddingsPerMember(PerMember):
    """Embeddings that members do not share: all read the same inputs."""

    def forward(self, *args, **kwargs) -> torch.Tensor:
        return torch.stack([module(*args, **kwargs) for module in self])


class DropoutPerMember(nn.Dropout):
    """Dropout behind a part that members share, with a mask of its own for each of them."""

    def __init__(self, p: float, num_members: int):
        super().__init__(p)
        self.num_members = num_members

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, ...) -> (members, batch, ...) where it drops; unchanged where it does not."""
        if self.training and self.p > 0 and self.num_members > 1:
            hidden_states = hidden_states.expand(self.num_members, *hidden_states.shape)
        return super().forward(hidden_states)


def shared_or_per_member(
    config: PreTrainedConfig, part: str, build: Callable[[], nn.Module], layer: int | None = None
) -> nn.Module:
    """Build one module for all members where they share `part` (or are alone, or `layer` is in the
    trunk), otherwise one for each. Shared embeddings get dropout that differs between members."""
    members = config.num_members
    if layer is not None:
        members = config.members_in(layer)
    if part not in config.shared and members > 1:
        container = PerMember
        if part == "embeddings":
            container = EmbeddingsPerMember
        return container(build() for _ in range(members))
    module = build()
    if part == "embeddings" and not config.trunk_layers:
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, DropoutPerMember(child.p, config.num_members))
    return module


# Fused attention, equations 4 and 5


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
    """Attention head by head: (rows, heads, tokens, head_dim) -> (rows, tokens, heads, head_dim),
    and its weights."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    if module.float32_softmax and scores.dtype == torch.float64:
        # The mask's smallest float64 would become -inf in float32, and a row that sees only padding
        # NaN.
        scores = scores.clamp(min=torch.finfo(torch.float32).min)
    dtype = None
    if module.float32_softmax:
        dtype = torch.float32
    weights = nn.functional.softmax(scores, dim=-1, dtype=dtype)
    weights = nn.functional.dropout(weights.to(query.dtype), p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


class MembersOnBatch:
    """The layout with members on the batch axis: (members * batch, heads, tokens, head_dim).

    All members keep equally many heads, `width` rows of queries. Nothing is copied.
    """

    def __init__(self, num_members: int, width: int, head_dim: int, is_trunk: bool):
        self.num_members = num_members
        self.width = width
        self.head_dim = head_dim
        self.rows_are_batch = is_trunk  # and not the batch of each member

    def split(self, projected: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        """Split `count` of query, key and value.

        (members, batch, tokens, count * width) -> (members * batch, heads, tokens, head_dim) each
        """
        heads = projected.shape[-1] // (count * self.head_dim)
        states = projected.view(-1, projected.shape[2], count, heads, self.head_dim)
        return states.permute(2, 0, 3, 1, 4).unbind(0)

    def cut_off_queries(self, projected: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cut what is projected into queries, and keys and values."""
        return projected[..., : self.width], projected[..., self.width :]

    def unpack(self, output: torch.Tensor) -> torch.Tensor:
        """(members * batch, tokens, heads, head_dim) -> (members, batch, tokens, width)"""
        return output.reshape(self.num_members, -1, output.shape[1], self.width)

    def norm(self, norms: PerMember, states: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Norm each member's queries or keys, (members * batch, heads, tokens, head_dim).

        heads: how many of them each member has
        """
        return norms(states.unflatten(0, (self.num_members, -1))).flatten(0, 1)


class MembersOnHeads:
    """The layout with members on the head axis: (batch, heads of all members, tokens, head_dim).

    Members may keep different numbers of heads; those without any are left out.

    widths: each member's rows of queries
    """

    rows_are_batch = True

    def __init__(self, widths: Sequence[int], head_dim: int):
        self.num_members = len(widths)
        self.widths = [width for width in widths if width > 0]
        self.head_dim = head_dim
        self.is_uniform = len(set(widths)) == 1

    def split(self, projected: Sequence[torch.Tensor], count: int) -> tuple[torch.Tensor, ...]:
        """Split `count` of query, key and value.

        (batch, tokens, count * width) of each member -> (batch, heads of all members, tokens,
        head_dim) each
        """
        members = [states.unflatten(-1, (count, -1, self.head_dim)) for states in projected]
        return torch.cat(members, dim=-2).permute(2, 0, 3, 1, 4).unbind(0)

    def cut_off_queries(self, projected: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Cut what is projected into queries, and keys and values."""
        members = list(zip(projected, self.widths, strict=True))
        queries = [states[..., :width] for states, width in members]
        keys_and_values = [states[..., width:] for states, width in members]
        return queries, keys_and_values

    def unpack(self, output: torch.Tensor) -> torch.Tensor:
        """(batch, tokens, heads of all members, head_dim) -> (members, batch, tokens, width), or
        where widths differ (batch, tokens, sum of widths)"""
        output = output.flatten(2)
        if self.is_uniform:
            output = output.unflatten(-1, (self.num_members, -1)).movedim(-2, 0)
        return output

    def norm(self, norms: PerMember, states: torch.Tensor, heads: Sequence[int]) -> torch.Tensor:
        """Norm each member's queries or keys, (batch, heads of all members, tokens, head_dim).

        heads: how many of them each member has
        """
        norms_with_heads = [norm for norm, count in zip(norms, heads, strict=True) if count]
        parts = states.split([count for count in heads if count], dim=1)
        return torch.cat([norm(part) for norm, part in zip(norms_with_heads, parts, strict=True)], dim=1)


Layout = MembersOnBatch | MembersOnHeads


class HydraAttention(nn.Module):
    """Multi-head attention of all members at once; member m keeps `kept_heads[m]` of the backbone's
    heads.

    A member's queries, keys and values lie below each other in `qkv_proj`: one product. Attention
    is computed head by head, so members cannot mix, whichever axis carries them (`layout`): the
    batch axis where all keep equally many heads, the head axis where head counts differ, where
    scores have a bias, and for the eager backend, which returns its weights in this shape.

    Families with positions in the attention override `place`, or set `adds_bias` and have
    `add_bias`
    (`relative_attention`); both get what `embed_inputs` returns as "positions". `norm` is for those
    that normalise queries and keys.
    """

    adds_bias = False  # whether `add_bias` changes the mask, which is added to the scores

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm):
        super().__init__()
        spec = config.layer_spec
        kept_heads = config.kept_heads[layer][: config.members_in(layer)]
        self.config = config
        self.layer = layer
        self.num_members = len(kept_heads)
        self.is_trunk = layer < config.trunk_layers
        # The softmax keeps the scale of the backbone's heads, however many are left.
        self.head_dim = spec.head_dim or config.hidden_size // config.num_attention_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = spec.attention_dropout
        self.float32_softmax = spec.float32_softmax
        self.is_causal = False
        self.set_kept_heads(kept_heads)
        self.qkv_proj = GroupedLinear(config.hidden_size, self.qkv_widths(), spec.qkv_bias)
        self.qkv_proj.trains_key_bias = spec.trains_key_bias
        self.o_proj = GroupedOutput(self.widths, config.hidden_size, spec.output_bias)
        self.register_buffer("kept_heads_mask", make_kept_heads_mask(kept_heads, config.num_attention_heads))

    def set_kept_heads(self, kept_heads: list[list[int]]) -> None:
        """Keep these heads of each member, and choose the layout."""
        self.kept_heads = kept_heads
        self.widths = [len(heads) * self.head_dim for heads in kept_heads]  # of each member's heads together
        self.has_no_head = not any(self.widths)
        self.has_grouped_queries = self.qkv_widths() != [3 * width for width in self.widths]
        self.layout_on_heads = MembersOnHeads(self.widths, self.head_dim)
        self.layout: Layout = self.layout_on_heads
        if self.fits_batch_axis():
            self.layout = MembersOnBatch(self.num_members, self.widths[0], self.head_dim, self.is_trunk)

    def fits_batch_axis(self) -> bool:
        """Whether members are alike enough for the batch axis; a bias of positions is one of each
        member's heads."""
        has_bias_per_member = self.adds_bias and self.num_members > 1
        return len(set(self.widths)) == 1 and not has_bias_per_member

    def qkv_widths(self) -> list[int]:
        return [3 * width for width in self.widths]

    def rows_per_head(self) -> dict[str, int]:
        """Return the packed parts beside q, k, v and o that are pruned with their heads, and how
        many rows each head has there."""
        return {}

    def check_same_heads(self, saved: torch.Tensor) -> None:
        """Raise for weights that were saved for other heads than the config names.

        saved: their `kept_heads_mask`
        """
        if saved.is_meta:
            return
        heads = [row.nonzero().flatten().tolist() for row in saved]
        if heads != self.kept_heads:
            raise ValueError(
                f"the weights were saved for other heads than config.kept_heads names (layer {self.layer}: {heads} "
                f"saved, {self.kept_heads} named): use the config.json that was saved with them"
            )

    def _load_from_state_dict(self, state_dict, prefix, *args):
        self.check_same_heads(state_dict.setdefault(f"{prefix}kept_heads_mask", self.kept_heads_mask))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask=None, first_token_only: bool = False, *positions, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the heads' outputs before the output projection: (members, batch, query tokens,
        width) or, where head counts differ, (batch, query tokens, sum of widths); and from the
        eager backend the attention weights (batch, heads of all members, query tokens, tokens),
        which Transformers collects from here (`_can_record_outputs`).

        hidden_states: (members or 1, batch, tokens, hidden)
        attention_mask: what `encoder_mask` returns
        first_token_only: compute queries of the first token alone
        positions: for `place` and `add_bias`
        """
        backend = self.config._attn_implementation
        if self.has_no_head:
            return self.outputs_without_heads(hidden_states, first_token_only, backend)
        layout = self.layout
        if backend == "eager":
            layout = self.layout_on_heads

        # Project and place: (rows, heads, tokens, head_dim) each, of queries perhaps the first
        # token alone.
        query, key, value = self.project(hidden_states, first_token_only, layout)
        if positions:
            query, key, value = self.place(query, key, value, layout, *positions)

        # Mask: (rows, heads or 1, query tokens, tokens), or what else the backend reads.
        if attention_mask is not None:
            if layout.rows_are_batch:  # the mask is repeated over the members
                attention_mask = attention_mask[: hidden_states.shape[1]]
            if first_token_only and attention_mask.dim() == 4:
                attention_mask = attention_mask[:, :, :1]
        if self.adds_bias:
            attention_mask = self.add_bias(attention_mask, hidden_states, query, key, *positions)

        # Attend: (rows, query tokens, heads, head_dim).
        attend: Callable = ALL_ATTENTION_FUNCTIONS.get_interface(backend, eager_attention_forward)
        dropout = self.attention_dropout if self.training else 0.0
        output, weights = attend(
            self, query, key, value, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs
        )
        return layout.unpack(output), weights

    def outputs_without_heads(
        self, hidden_states: torch.Tensor, first_token_only: bool, backend: str
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return what `forward` does of a layer in which no member keeps a head: outputs and
        weights of size zero."""
        _, batch, tokens, _ = hidden_states.shape
        queries = tokens
        if first_token_only:
            queries = 1
        weights = None
        if backend == "eager":
            weights = hidden_states.new_zeros(batch, 0, queries, tokens)
        return hidden_states.new_zeros(self.num_members, batch, queries, 0), weights

    def project(
        self, hidden_states: torch.Tensor, first_token_only: bool, layout: Layout
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return query, key and value, (rows, heads, tokens, head_dim) each: rows and heads as
        `layout` has them."""
        if first_token_only:
            query_rows = [slice(width) for width in self.widths]
            other_rows = [slice(width, None) for width in self.widths]
            queries = self.qkv_proj(hidden_states[:, :, :1], query_rows)
            keys_and_values = self.qkv_proj(hidden_states, other_rows)
        elif self.has_grouped_queries:
            queries, keys_and_values = layout.cut_off_queries(self.qkv_proj(hidden_states))
        else:
            query, key, value = layout.split(self.qkv_proj(hidden_states), 3)
            return query, key, value
        [query] = layout.split(queries, 1)
        key, value = layout.split(keys_and_values, 2)
        return query, key, value

    def place(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: Layout, *positions
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Put the positions into query and key: (rows, heads, tokens, head_dim) each, value too."""
        return query, key, value


def make_kept_heads_mask(kept_heads: list[list[int]], num_heads: int) -> torch.Tensor:
    """Return a layer's kept heads as ones and zeros, (members, heads of the backbone)."""
    is_kept = [[head in heads for head in range(num_heads)] for heads in kept_heads]
    return torch.tensor(is_kept, dtype=torch.uint8)


def encoder_mask(
    config: PreTrainedConfig, hidden_states: torch.Tensor, attention_mask, create=create_bidirectional_mask, **options
):
    """Return the mask that an encoder's layers read, repeated over the members:
    (members * batch, ...)

    hidden_states: the first layer's, (1 or members, batch, tokens, hidden)
    attention_mask: where nothing is masked, do without a mask: any mask would rule out the fastest
        kernels
    """
    mask = create(config=config, inputs_embeds=hidden_states[0], attention_mask=attention_mask, **options)
    if mask is None:
        return None
    if mask.dim() == 4 and mask.shape[1] != 1:
        raise ValueError(
            f"attention_mask has {mask.shape[1]} heads: members have other heads each, pass a mask of shape "
            "(batch, tokens) or (batch, 1, tokens, tokens)"
        )
    mask = mask.expand(hidden_states.shape[1], *mask.shape[1:])
    if config.num_members == 1:
        return mask
    other_axes = [1] * (mask.dim() - 1)
    return mask.repeat(config.num_members, *other_axes)


# Output projection and MLP, equations 6 and 7: the layer


class HydraMLP(nn.Module):
    """The transformer's two-layer MLP, on any leading axes; with a gate, `fc1` rows are [gate;
    up]."""

    def __init__(self, hidden_size: int, spec: LayerSpec):
        super().__init__()
        self.has_gate = spec.gated_mlp
        rows_of_fc1 = spec.inner_size
        if self.has_gate:
            rows_of_fc1 = 2 * spec.inner_size
        self.fc1 = nn.Linear(hidden_size, rows_of_fc1, spec.mlp_bias)
        self.activation_fn = ACT2FN[spec.activation]
        self.dropout = optional_dropout(spec.inner_dropout)
        self.fc2 = nn.Linear(spec.inner_size, hidden_size, spec.mlp_bias)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        shape = hidden_states.shape
        # What stands in for a linear layer (8-bit ones, for instance) may know three axes at most.
        if len(shape) > 3:
            hidden_states = hidden_states.flatten(0, -3)
        inner = self.fc1(hidden_states)
        if self.has_gate:
            gate, inner = inner.chunk(2, dim=-1)
            inner = self.activation_fn(gate) * inner
        else:
            inner = self.activation_fn(inner)
        if self.dropout is not None:
            inner = self.dropout(inner)
        return self.fc2(inner).reshape(shape)


def optional_dropout(p: float | None) -> nn.Dropout | None:
    """Return a dropout, or None where the backbone has none."""
    return None if p is None else nn.Dropout(p)


class LayerScale(nn.Module):
    """A learned factor for each channel of a branch, which is added to the residual stream: one row
    for each member, or one for all of them where they share the branch."""

    def __init__(self, members: int, hidden_size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(members, hidden_size))

    def forward(self, branch: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + factors * branch: (members, ..., hidden) and (members or 1, ..., hidden) ->
        (members, ..., hidden)"""
        members, hidden_size = self.weight.shape
        factors = self.weight.view(members, *[1] * (branch.dim() - 2), hidden_size)
        return torch.addcmul(residual, branch, factors)  # one kernel, as the sum alone


class HydraLayer(GradientCheckpointingLayer):
    """One Transformer layer of all members, or of one in the trunk: attention, then
    `project_and_feed`."""

    def __init__(self, config: PreTrainedConfig, layer: int, norm: Norm, attention_class: type[HydraAttention]):
        super().__init__()
        spec = config.layer_spec
        self.norm_first = spec.norm_first
        self.drop_path = spec.drop_path
        if isinstance(spec.drop_path, tuple):
            self.drop_path = spec.drop_path[layer]
        layer_norm = partial(shared_or_per_member, config, "layernorm", partial(norm, config.hidden_size), layer)
        self.attention_norm = layer_norm()
        self.attention = attention_class(config, layer, norm)
        self.mlp_norm = layer_norm()
        self.mlp = shared_or_per_member(config, "mlp", partial(HydraMLP, config.hidden_size, spec), layer)
        self.output_dropout = optional_dropout(spec.output_dropout)
        self.mlp_dropout = optional_dropout(spec.mlp_dropout)
        self.attention_scale = None
        self.mlp_scale = None
        if spec.layer_scale is not None:
            members = config.members_in(layer)
            self.attention_scale = LayerScale(members, config.hidden_size)
            members_of_mlp = 1 if "mlp" in config.shared else members
            self.mlp_scale = LayerScale(members_of_mlp, config.hidden_size)

    def forward(
        self, hidden_states: torch.Tensor, attention_mask=None, first_token_only: bool = False, *positions, **kwargs
    ) -> torch.Tensor:
        """(members or 1, batch, tokens, hidden) -> (members, batch, tokens or 1, hidden)"""
        normed = hidden_states
        if self.norm_first:
            normed = self.attention_norm(hidden_states)
        heads, _ = self.attention(normed, attention_mask, first_token_only, *positions, **kwargs)
        if first_token_only:
            hidden_states = hidden_states[:, :, :1]
        return self.project_and_feed(hidden_states, heads)

    def project_and_feed(self, hidden_states: torch.Tensor, heads: torch.Tensor) -> torch.Tensor:
        """Run equations 6 and 7: output projection and MLP, each added to the residual stream.

        hidden_states: (members or 1, ..., query tokens, hidden), of the tokens that the attention
            computed
        heads: what the attention returned; with equal head counts, axes may be added before the
            tokens, as pruning does

        Returns (members, ..., query tokens, hidden).
        """
        # A dropout is called in training alone: a call takes as long as a small kernel.
        drops_branches = self.drop_path and self.training

        # The output projection.
        branch = self.attention.o_proj(heads)
        if self.output_dropout is not None and self.output_dropout.training:
            branch = self.output_dropout(branch)
        if drops_branches:
            branch = self.drop(branch)
        if self.attention_scale is None:
            hidden_states = hidden_states + branch
        else:
            hidden_states = self.attention_scale(branch, hidden_states)
        if not self.norm_first:
            hidden_states = self.attention_norm(hidden_states)

        # The MLP.
        normed = hidden_states
        if self.norm_first:
            normed = self.mlp_norm(hidden_states)
        branch = self.mlp(normed)
        if self.mlp_dropout is not None and self.mlp_dropout.training:
            branch = self.mlp_dropout(branch)
        if drops_branches:
            branch = self.drop(branch)
        if self.mlp_scale is None:
            hidden_states = hidden_states + branch
        else:
            hidden_states = self.mlp_scale(branch, hidden_states)
        if not self.norm_first:
            hidden_states = self.mlp_norm(hidden_states)
        return hidden_states

    def drop(self, branch: torch.Tensor) -> torch.Tensor:
        """Leave a branch out for some samples of some members: stochastic depth."""
        keep = 1 - self.drop_path
        other_axes = [1] * (branch.dim() - 2)
        mask = branch.new_empty(*branch.shape[:2], *other_axes).bernoulli_(keep)
        return branch * (mask / keep)


# The encoder


@dataclass
class HydraModelOutput(ModelOutput):
    """What an encoder returns. Standard fields hold the mean over members.

    last_hidden_state: (batch, tokens, hidden), the mean over the members
    pooler_output: (batch, pooled), the mean over the members; for CLIP's features (batch,
        projection)
    hidden_states: one (batch, members, tokens, hidden) per layer and for the embeddings, where
        asked for
    attentions: one (batch, heads of all members, or of the trunk, tokens, tokens) per layer, where
        asked for
    member_last_hidden_state: (batch, members, tokens, hidden)
    member_pooler_output: (batch, members, pooled); for CLIP's features (batch, members, projection)
    """

    last_hidden_state: torch.FloatTensor | None = None
    pooler_output: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    member_last_hidden_state: torch.FloatTensor | None = None
    member_pooler_output: torch.FloatTensor | None = None


class HydraEncoderMixin:
    """The fused encoder, without a head. A family names `embeddings_class`, and where it differs
    from a ViT

    - `attention_class` and `layer_class`; `make_norm`;
    - `last_norm`: the name of the norm behind the layers;
    - `add_positions(config)`: makes modules between the embeddings and the layers;
    - `embed_inputs(**inputs)`: the states that enter the first layer, (members or 1, batch, tokens,
      hidden), the mask, and further arguments of the layers, with "positions" for their attention;
    - `add_pooling(config)`: makes the `pooler`, or what else `pool(hidden_states, **inputs)` needs:
      the last states (members, batch, tokens, hidden) -> (members, batch, pooled) or None.
    """

    is_base_model = True
    embeddings_class: type[nn.Module]
    attention_class: type[HydraAttention] = HydraAttention
    layer_class: type[HydraLayer] = HydraLayer
    last_norm: str | None = None
    last_hidden_state_is_normed = False  # whether the last of `hidden_states` has passed that norm
    layer_order: Sequence[int] = ()  # the numbers of the layers as they run, where some run several times

    def __init__(self, config: PreTrainedConfig, add_pooling_layer: bool | None = None):
        super().__init__(config)
        norm = self.make_norm(config)
        self.embeddings = shared_or_per_member(config, "embeddings", lambda: self.embeddings_class(config))
        self.add_positions(config)
        numbers = range(len(config.kept_heads))
        self.layers = nn.ModuleList(self.layer_class(config, number, norm, self.attention_class) for number in numbers)
        if self.last_norm is not None:
            setattr(self, self.last_norm, shared_or_per_member(config, "layernorm", partial(norm, config.hidden_size)))
        if add_pooling_layer is None:
            add_pooling_layer = getattr(config, "add_pooling_layer", True)
        self.has_pooling = add_pooling_layer
        self.pooler = None
        if self.has_pooling:
            self.add_pooling(config)
        self.post_init()

    def make_norm(self, config: PreTrainedConfig) -> Norm:
        return partial(nn.LayerNorm, eps=config.layer_spec.norm_eps)

    def add_positions(self, config: PreTrainedConfig) -> None:
        pass

    def add_pooling(self, config: PreTrainedConfig) -> None:
        pass

    def pool(self, hidden_states: torch.Tensor, **inputs) -> torch.Tensor | None:
        if self.pooler is None:
            return None
        return self.pooler(hidden_states)

    def embed_inputs(self, attention_mask: torch.Tensor | None = None, **inputs) -> tuple[torch.Tensor, Any, dict]:
        """Return the states that enter the first layer, the mask, and further arguments of the
        layers."""
        states = self.embeddings(**inputs)
        if states.dim() == 3:  # of members that share them
            states = states.unsqueeze(0)
        mask = None
        if attention_mask is not None:
            mask = encoder_mask(self.config, states, attention_mask)
        return states, mask, {}

    def encode(
        self,
        inputs: dict,
        first_token_only: bool = False,
        members_only: bool = False,
        output_hidden_states: bool | None = None,
        **kwargs,
    ) -> HydraModelOutput:
        """Run the encoder: embeddings, layers, the last norm, and pooling.

        first_token_only: let the last layer compute the first token alone, unless states or
            attentions are returned
        members_only: leave out the means over members, which classifiers do not read
        """
        # Embeddings.
        hidden_states, mask, layer_kwargs = self.embed_inputs(**inputs)
        kwargs |= layer_kwargs
        positions = kwargs.pop("positions", ())  # positional, as gradient checkpointing tracks no others

        # What is returned.
        members = self.num_members
        all_hidden_states = []
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        returns_attentions = kwargs.get("output_attentions", getattr(self.config, "output_attentions", False))
        first_token_only = first_token_only and not output_hidden_states and not returns_attentions

        def returned(states: torch.Tensor) -> torch.Tensor:  # read from the returned tensor, which then gets gradients
            all_hidden_states.append(batch_first(states, members))
            return all_hidden_states[-1].transpose(0, 1)

        # Layers.
        layers = list(self.layers)  # indexing a ModuleList takes longer
        order = self.layer_order or range(len(layers))
        for step, layer in enumerate(order):
            if output_hidden_states:
                hidden_states = returned(hidden_states)[: self.config.members_in(layer)]
            is_for_first_token = first_token_only and step == len(order) - 1
            hidden_states = layers[layer](hidden_states, mask, is_for_first_token, *positions, **kwargs)

        # The last norm, and pooling.
        if output_hidden_states and not self.last_hidden_state_is_normed:
            hidden_states = returned(hidden_states)
        if self.last_norm is not None:
            hidden_states = getattr(self, self.last_norm)(hidden_states)
        if output_hidden_states and self.last_hidden_state_is_normed:
            hidden_states = returned(hidden_states)
        pooled = None
        if self.has_pooling:
            pooled = self.pool(hidden_states, **inputs)

        # Outputs of the members, and their means.
        mean_states = None
        mean_pooled = None
        member_pooled = None
        if not members_only:
            mean_states = mean_of_members(hidden_states)
        if pooled is not None:
            member_pooled = batch_first(pooled, members)
            if not members_only:
                mean_pooled = mean_of_members(pooled)
        return HydraModelOutput(
            last_hidden_state=mean_states,
            pooler_output=mean_pooled,
            hidden_states=tuple(all_hidden_states) if output_hidden_states else None,
            member_last_hidden_state=hidden_states.expand(members, -1, -1, -1).transpose(0, 1),
            member_pooler_output=member_pooled,
        )

    def first_embeddings(self) -> nn.Module:
        """Return the embeddings; those of the first member where members do not share them."""
        if isinstance(self.embeddings, PerMember):
            return self.embeddings[0]
        return self.embeddings


class GroupedPooler(nn.Module):
    """A pooler per member, on the first token: (members, batch, tokens, hidden) -> (members, batch,
    pooled)."""

    def __init__(self, hidden_size: int, pooled_size: int, num_members: int, activation: nn.Module):
        super().__init__()
        self.dense = GroupedLinear(hidden_size, [pooled_size] * num_members)
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden_states[:, :, 0]))


def mean_of_members(states: torch.Tensor) -> torch.Tensor:
    """(members or 1, batch, ...) -> (batch, ...)"""
    if states.shape[0] == 1:
        return states[0]
    return states.mean(dim=0)


def batch_first(hidden_states: torch.Tensor, num_members: int) -> torch.Tensor:
    """(members or 1, batch, ...) -> (batch, members, ...), a view."""
    return hidden_states.expand(num_members, *hidden_states.shape[1:]).transpose(0, 1)


# The classifier and the ensemble's prediction, equation 2


@dataclass
class HydraClassifierOutput(ModelOutput):
    """What a classifier returns.

    loss: scalar, where labels were given
    logits: (batch, classes), the log of the members' mean probability; of a token classifier
        (batch, tokens, classes)
    member_logits: (batch, members, classes); of a token classifier (batch, members, tokens,
        classes)
    hidden_states: one (batch, members, tokens, hidden) per layer and for the embeddings, where
        asked for
    attentions: one (batch, heads of all members, or of the trunk, tokens, tokens) per layer, where
        asked for
    detector_score, abstain, prediction_set, interval: what a calibrated model decides, see
        `task.DecisionOutput`; the logits of a calibrated classifier have its temperature
    """

    loss: torch.FloatTensor | None = None
    logits: torch.FloatTensor | None = None
    member_logits: torch.FloatTensor | None = None
    hidden_states: tuple[torch.FloatTensor, ...] | None = None
    attentions: tuple[torch.FloatTensor, ...] | None = None
    detector_score: torch.FloatTensor | None = None
    abstain: torch.BoolTensor | None = None
    prediction_set: torch.BoolTensor | None = None
    interval: torch.FloatTensor | None = None


class HydraClassifierMixin:
    """A head per member on a fused encoder: `logits` is the ensemble's prediction, `member_logits`
    each member's.

    A family names `encoder_class`, and where it differs from a ViT what is below. Another head than
    one map overrides `add_head` and `prepare`. `HydraModelMixin` adds the `decision` of a
    calibrated model.
    """

    encoder_class: type[nn.Module]
    encoder_options: dict[str, bool] = {}  # of the encoder below the head
    reads_first_token = True  # alone, so that the last layer need not compute the others
    reads_all_layers = False  # the states of every layer: by `encode_all_layers`, which the family then has
    hidden_states_read = 1  # how many states side by side the head reads
    head_dropout: tuple[str, ...] = ()  # config fields; the first that is set says how much the head drops
    has_head_bias = True
    last_map = "classifier"  # the module that gives the logits

    def __init__(self, config: PreTrainedConfig):
        super().__init__(config)
        self.choose_task()  # `from_pretrained` changes configs that were checked
        self.num_labels = config.num_labels
        setattr(self, self.base_model_prefix, self.encoder_class(config, **self.encoder_options))
        self.dropout = None
        self.add_head(config)
        self.post_init()

    def add_head(self, config: PreTrainedConfig) -> None:
        """Make the members' heads, with what comes between them and the encoder."""
        if self.head_dropout:
            values = [getattr(config, name, None) for name in self.head_dropout]
            first = next((value for value in values if value is not None), 0.1)
            self.dropout = nn.Dropout(first)
        size = self.hidden_states_read * config.hidden_size
        widths = [config.num_labels] * config.num_members
        self.classifier = GroupedLinear(size, widths, self.has_head_bias)

    def prepare(self, hidden_states: torch.Tensor, pooled: torch.Tensor | None) -> torch.Tensor:
        """Return what the last map reads.

        (members, batch, tokens or 1, hidden) and (members, batch, pooled) -> (members, batch,
        features)
        """
        features = pooled
        if pooled is None:
            features = hidden_states[:, :, 0]
        if self.dropout is not None:
            features = self.dropout(features)
        return features

    @property
    def task(self) -> Task:
        """Return what the model predicts. A user may change it in the config of a loaded model."""
        return task_of_config(self.config)

    def choose_task(self) -> None:
        """Validate what the config says of the task, and choose the task of the next forwards.

        Raises where the code of the task is not here.
        """
        config = self.config
        set_problem_type(config)
        task = self.task
        task.check_config(config)
        self._task = task
        self._fields_of_task = (config.problem_type, config.num_labels, config.aggregate)

    def compute_loss(self, labels: torch.Tensor, member_logits: torch.Tensor, **kwargs) -> torch.Tensor:
        """Return the mean of the members' losses, or the loss of the ensemble's prediction, as
        `config.ensemble_loss` says: labels (batch, ...) and logits (batch, members, ...) -> a
            scalar"""
        predictions = member_logits.unbind(dim=1)
        if self.config.ensemble_loss == "ensemble":
            predictions = [self.task.ensemble_logits(member_logits, self.config)]
        return self.task.mean_loss(self.loss_function, labels, predictions, self.config, **kwargs)

    def encode_and_classify(
        self, inputs: dict, labels: torch.Tensor | None, group: torch.Tensor | None = None, **kwargs
    ) -> HydraClassifierOutput:
        """Run the classifier: the encoder, the members' heads, the loss, and the ensemble's
        prediction.

        group: (batch,), of a model that was calibrated by a column, see `Decision.forward`"""
        # The encoder.
        options = {"first_token_only": self.reads_first_token, "members_only": True, "return_dict": True} | kwargs
        encoder = self.base_model
        if self.reads_all_layers:
            encoder = self.encode_all_layers
        outputs: HydraModelOutput = encoder(**inputs, **options)

        # The members' heads.
        hidden_states = outputs.member_last_hidden_state.transpose(0, 1)
        pooled = outputs.member_pooler_output
        if pooled is not None:
            pooled = pooled.transpose(0, 1)
        features = self.prepare(hidden_states, pooled)
        member_logits = self.get_submodule(self.last_map)(features).transpose(0, 1)

        # The task: chosen anew where a user has changed the config of a loaded model.
        config = self.config
        if self._fields_of_task != (config.problem_type, config.num_labels, config.aggregate):
            self.choose_task()

        # The loss.
        loss = None
        if labels is not None:
            loss = self.compute_loss(labels, member_logits, **kwargs)

        # The decision of a calibrated model.
        decided = {}
        if self.decision is not None:
            self.decision.watch(member_logits)
        if self.decision is not None and self.is_calibrated:
            member_features = None
            if self.decision.reads_features:
                member_features = features.transpose(0, 1)
            options = {} if group is None else {"group": group}  # decisions of earlier versions know none
            decision = self.decision(member_logits, member_features, **options)
            member_logits = decision.member_logits
            decided = decision.outputs()

        # The ensemble's prediction.
        logits = self._task.ensemble_logits(member_logits, config)
        if loss is None and self.training and self.num_members > 1 and config.ensemble_loss == "members":
            reason = "config.ensemble_loss is 'members', a loss for each member"
            other_way = ", or set config.ensemble_loss to 'ensemble'"
            warn_if_loss_uses_ensemble_logits(logits, "num_items_in_batch" in kwargs, reason, other_way)
        return HydraClassifierOutput(loss, logits, member_logits, outputs.hidden_states, outputs.attentions, **decided)


def warn_if_loss_uses_ensemble_logits(
    logits: torch.Tensor, from_trainer: bool, reason: str, other_way: str = ""
) -> None:
    """Notice in the backward pass a loss of the ensemble's logits where each member is to have its
    own. Trainer's label smoothing computes one, and is stopped; other callers are warned."""

    def check(gradient: torch.Tensor) -> None:
        if gradient is None or not gradient.any():
            return  # DDP passes nothing, or zeros, to outputs that no loss was computed from
        message = (
            f"the loss is computed from the ensemble's logits, but {reason}: compute it from member_logits (for "
            f"label_smoothing_factor use HydraTrainer of hydra_transformers.training in place of Trainer){other_way}"
        )
        if from_trainer:
            raise RuntimeError(message)
        logger.warning_once(message)

    if logits.requires_grad and not torch.compiler.is_compiling() and not torch.jit.is_tracing():
        logits.register_hook(check)
