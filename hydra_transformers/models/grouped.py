"""Layers that hold one map per member: packed (`GroupedLinear`, `GroupedOutput`) or side by side (`PerMember`).

Tensors that belong to members carry them first: (members, batch, tokens, features). Each member's part is then one
contiguous block, so that grouped products, attention over (members * batch) and the shared layers over
(members * batch * tokens) are all views of one tensor and nothing is copied between them. A leading size of 1 stands
for a tensor that is still the same for all members.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import PreTrainedConfig

from .compat import is_exporting


# From this many rows per member on, one product per member beats one batched product.
ROWS_FOR_ONE_PRODUCT_PER_MEMBER = 2048


class Grouped(nn.Module):
    """What the two packed layers have in common: member m owns the next `widths[m]` rows of `weight`."""

    def __init__(self, widths: Sequence[int], columns: int, bias_shape: tuple[int, ...] | None):
        super().__init__()
        self.widths = list(widths)
        self.columns = columns
        self.weight = nn.Parameter(torch.empty(sum(widths), columns))
        self.register_parameter("bias", None if bias_shape is None else nn.Parameter(torch.empty(bias_shape)))

    @property
    def is_uniform(self) -> bool:
        return len(set(self.widths)) == 1

    def member_rows(self, parameter: str) -> list[int]:
        """How many rows of `parameter` ("weight" or "bias") each member owns, in the order of the members."""
        return self.widths

    def extra_repr(self) -> str:
        return f"widths={self.widths}, columns={self.columns}, bias={self.bias is not None}"


class GroupedLinear(Grouped):
    """M linear maps `in_features -> widths[m]`; weight (sum of widths, in_features), bias (sum of widths)."""

    def __init__(self, in_features: int, widths: Sequence[int], bias: bool = True):
        super().__init__(widths, in_features, (sum(widths),) if bias else None)

    def forward(
        self, hidden_states: torch.Tensor, rows: Sequence[slice] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """(members or 1, ..., in_features) -> (members, ..., width), or where widths differ a tuple of (..., width), one
        for each member that has any rows.

        rows: the part of each member's rows to compute; all of them by default
        """
        members = len(self.widths)
        if hidden_states.shape[0] < members:
            hidden_states = hidden_states.expand(members, *hidden_states.shape[1:])
        if not self.is_uniform or (rows is not None and any(part != rows[0] for part in rows)):
            return self._one_after_the_other(hidden_states, rows)
        part = slice(None) if rows is None else rows[0]
        weight = self.weight.view(members, self.widths[0], self.columns)[:, part].transpose(1, 2)
        bias = None if self.bias is None else self.bias.view(members, 1, self.widths[0])[..., part]
        return grouped_product(hidden_states, weight, bias)

    def _one_after_the_other(self, hidden_states, rows: Sequence[slice] | None) -> tuple[torch.Tensor, ...]:
        filled = [m for m, width in enumerate(self.widths) if width > 0]
        widths = [self.widths[m] for m in filled]
        parts = [slice(None) if rows is None else rows[m] for m in filled]
        weights = self.weight.split(widths)
        biases = [None] * len(filled) if self.bias is None else self.bias.split(widths)
        return tuple(
            nn.functional.linear(hidden_states[m], weight[part], None if bias is None else bias[part])
            for m, weight, bias, part in zip(filled, weights, biases, parts, strict=True)
        )


class GroupedOutput(Grouped):
    """M linear maps `widths[m] -> out_features`; weight (sum of widths, out_features), bias (members, out_features)."""

    def __init__(self, widths: Sequence[int], out_features: int, bias: bool = True):
        super().__init__(widths, out_features, (len(widths), out_features) if bias else None)

    def member_rows(self, parameter: str) -> list[int]:
        return self.widths if parameter == "weight" else [1] * len(self.widths)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(members, ..., width) -> (members, ..., out_features); where widths differ (..., sum of widths), the members'
        inputs side by side."""
        if not self.is_uniform:
            return self._one_after_the_other(hidden_states)
        members, width = len(self.widths), self.widths[0]
        if width == 0:  # no member has a head: all that is left of the attention is its output bias
            shape = hidden_states.shape[1:-1]
            if self.bias is None:
                return hidden_states.new_zeros(members, *shape, self.columns)
            return self.bias.view(members, *[1] * len(shape), -1).expand(members, *shape, -1)
        bias = None if self.bias is None else self.bias.unsqueeze(1)
        return grouped_product(hidden_states, self.weight.view(members, width, self.columns), bias)

    def _one_after_the_other(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # Products of width zero are an error or a wrong number in many exported formats: members without heads are left
        # out of them, and keep their bias, in the type that products have here (autocast).
        filled = [m for m, width in enumerate(self.widths) if width > 0]
        widths = [self.widths[m] for m in filled]
        biases = [None] * len(self.widths) if self.bias is None else self.bias
        parts = zip(filled, hidden_states.split(widths, -1), self.weight.split(widths), strict=True)
        products = {m: nn.functional.linear(states, weight.t(), biases[m]) for m, states, weight in parts}
        like = products[filled[0]]
        return torch.stack([products[m] if width else alone(biases[m], like) for m, width in enumerate(self.widths)])


def alone(bias: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    """What a map gives that reads nothing: its bias, or zeros, (..., out_features) as `like`."""
    return torch.zeros_like(like) if bias is None else bias.expand_as(like).type_as(like)


class GroupedPooler(nn.Module):
    """A pooler per member, on the first token: (members, batch, tokens, hidden) -> (members, batch, pooled)."""

    def __init__(self, hidden_size: int, pooled_size: int, num_members: int, activation: nn.Module):
        super().__init__()
        self.dense = GroupedLinear(hidden_size, [pooled_size] * num_members)
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden_states[:, :, 0]))


class GroupedClassificationHead(nn.Module):
    """A head of two maps per member, with dropout before each: (members, batch, hidden) -> (members, batch, classes)."""

    def __init__(self, config: PreTrainedConfig, activation: nn.Module, dropout: float | None = None):
        """dropout: by default `config.hidden_dropout_prob`"""
        super().__init__()
        members = config.num_members
        self.dense = GroupedLinear(config.hidden_size, [config.hidden_size] * members)
        self.activation = activation
        self.dropout = nn.Dropout(config.hidden_dropout_prob if dropout is None else dropout)
        self.out_proj = GroupedLinear(config.hidden_size, [config.num_labels] * members)

    def prepare(self, features: torch.Tensor) -> torch.Tensor:
        """What the second map reads: (members, batch, hidden) -> (members, batch, hidden)"""
        return self.dropout(self.activation(self.dense(self.dropout(features))))

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.out_proj(self.prepare(features))


class GroupedLayerNorm(nn.Module):
    """A LayerNorm per member, on (members, ..., size); weight and bias (members, size), which are `per_member_parameters`."""

    def __init__(self, size: int, num_members: int, eps: float, bias: bool = True):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(num_members, size))
        self.register_parameter("bias", nn.Parameter(torch.zeros(num_members, size)) if bias else None)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        size, weights = hidden_states.shape[-1:], self.weight.unbind()
        biases = [None] * len(weights) if self.bias is None else self.bias.unbind()
        parts = zip(hidden_states.unbind(), weights, biases, strict=True)
        # One by one: what normalises, scales and adds at once rounds but once.
        return torch.stack([nn.functional.layer_norm(states, size, *own, self.eps) for states, *own in parts])


def are_few(rows: int) -> bool:
    """Whether launching kernels for this many rows per member takes longer than computing them."""
    # An exported graph serves batches of every size, so no size may decide on it.
    return is_exporting() or rows < ROWS_FOR_ONE_PRODUCT_PER_MEMBER


def grouped_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """One product per member: (members, ..., in) x (members, in, out) + (members, 1, out) -> (members, ..., out).

    Few rows: one batched product. Many rows: one product per member, because only there the bias is added inside the
    product; a batched one first writes it over the whole output.
    """
    if inputs.dim() > 3:
        shape = (*inputs.shape[:-1], weight.shape[-1])
        return grouped_product(inputs.flatten(1, -2), weight, bias).view(shape)
    members, rows, _ = inputs.shape
    if members == 1:
        return nn.functional.linear(inputs, weight[0].t(), None if bias is None else bias[0, 0])
    if are_few(rows):
        if bias is None:
            return torch.bmm(inputs, weight)
        if torch.compiler.is_compiling():
            return torch.bmm(inputs, weight) + bias  # a compiler adds it in the pass that comes next
        return torch.baddbmm(bias, inputs, weight)
    biases = [None] * members if bias is None else bias.squeeze(1)
    return torch.stack([nn.functional.linear(inputs[m], weight[m].t(), biases[m]) for m in range(members)])


class PerMember(nn.ModuleList):
    """One module per member, for a part that members do not share."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(members or 1, ...) -> (members, ...), member m through module m."""
        states = hidden_states.expand(len(self), *hidden_states.shape[1:])
        return torch.stack([module(states[m]) for m, module in enumerate(self)])


class DropoutPerMember(nn.Dropout):
    """Dropout behind a part that members share, with a mask for each of them, as members apart would draw."""

    def __init__(self, p: float, num_members: int):
        super().__init__(p)
        self.num_members = num_members

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(batch, ...) -> (members, batch, ...) where it drops; as they are where it does not."""
        if self.training and self.p > 0 and self.num_members > 1:
            hidden_states = hidden_states.expand(self.num_members, *hidden_states.shape)
        return super().forward(hidden_states)


def of_members(config: PreTrainedConfig, part: str, build: Callable[[], nn.Module], layer: int | None = None):
    """What `build` gives, once for all members where they share `part` (or are alone, or in the trunk), else for each."""
    members = config.num_members if layer is None else config.members_in(layer)
    if part not in config.shared and members > 1:
        return PerMember(build() for _ in range(members))
    module = build()
    if part == "embeddings" and not config.trunk_layers:
        for name, child in module.named_children():
            if isinstance(child, nn.Dropout):
                setattr(module, name, DropoutPerMember(child.p, config.num_members))
    return module


def embed(embeddings: nn.Module, *args, **kwargs) -> torch.Tensor:
    """Input embeddings (members, batch, tokens, hidden); (1, batch, tokens, hidden) where they are the same for all."""
    if isinstance(embeddings, PerMember):
        return torch.stack([of_member(*args, **kwargs) for of_member in embeddings])
    states = embeddings(*args, **kwargs)
    return states if states.dim() == 4 else states.unsqueeze(0)
