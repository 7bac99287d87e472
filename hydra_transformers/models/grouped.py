"""Layers that hold one map per member: packed (`GroupedLinear`, `GroupedOutput`) or side by side (`PerMember`).

Tensors that belong to members carry them first: (members, batch, tokens, features). Each member's part is then one
contiguous block, so that grouped products, attention over (members * batch) and the shared layers over
(members * batch * tokens) are all views of one tensor and nothing is copied between them. A leading size of 1 stands
for a tensor that is still the same for all members.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn
from transformers import initialization as init

from .shortcuts import is_bare, is_exporting, is_inference, is_plain_inference


# From this many rows per member on, one product per member beats one batched product.
ROWS_FOR_ONE_PRODUCT_PER_MEMBER = 2048


class Grouped(nn.Module):
    """What the two packed layers have in common: member m owns the next `widths[m]` rows of `weight`."""

    def __init__(self, widths: list[int], columns: int, bias_shape: tuple[int, ...] | None):
        super().__init__()
        self.widths = list(widths)
        self.columns = columns
        self.uniform = len(set(widths)) == 1
        self.weight = nn.Parameter(torch.empty(sum(widths), columns))
        self.register_parameter("bias", None if bias_shape is None else nn.Parameter(torch.empty(bias_shape)))

    @property
    def num_members(self) -> int:
        return len(self.widths)

    @property
    def filled(self) -> list[int]:
        """The members that own rows. The others are left out of all products: those of width zero are an error or a
        wrong number in many exported formats."""
        return [m for m, width in enumerate(self.widths) if width > 0]

    def split(self, tensor: torch.Tensor, dim: int = 0) -> tuple[torch.Tensor, ...]:
        """A tensor with all members side by side -> the parts of the `filled` ones."""
        return tensor.split([self.widths[m] for m in self.filled], dim)

    def member_rows(self, parameter: str) -> list[int]:
        """How many rows of `parameter` ("weight" or "bias") each member owns, in the order of the members."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"widths={self.widths}, columns={self.columns}, bias={self.bias is not None}"


class GroupedLinear(Grouped):
    """M linear maps `in_features -> widths[m]`; weight (sum of widths, in_features), bias (sum of widths)."""

    def __init__(self, in_features: int, widths: list[int], bias: bool = True):
        super().__init__(widths, in_features, (sum(widths),) if bias else None)

    def member_rows(self, parameter: str) -> list[int]:
        return self.widths

    def forward(self, hidden_states: torch.Tensor, packed: bool = False) -> torch.Tensor:
        """(members or 1, ..., in_features) -> (members, ..., width), for members of the same width, or packed:
        (members or 1, ..., in_features) -> (..., sum of widths), the members' outputs side by side."""
        if packed:
            return self._packed(hidden_states)
        members, width = self.num_members, self.widths[0]
        if hidden_states.shape[0] < members:
            hidden_states = hidden_states.expand(members, *hidden_states.shape[1:])
        weight = self.weight.view(members, width, self.columns).transpose(1, 2)
        bias = None if self.bias is None else self.bias.view(members, 1, width)
        return grouped_product(hidden_states, weight, bias)

    def _packed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if hidden_states.shape[0] == 1:
            return nn.functional.linear(hidden_states[0], self.weight, self.bias)
        biases = [None] * len(self.filled) if self.bias is None else self.split(self.bias)
        outputs = [
            nn.functional.linear(hidden_states[m], weight, bias)
            for m, weight, bias in zip(self.filled, self.split(self.weight), biases, strict=True)
        ]
        return torch.cat(outputs, dim=-1)


class GroupedOutput(Grouped):
    """M linear maps `widths[m] -> out_features`; weight (sum of widths, out_features), bias (members, out_features)."""

    def __init__(self, widths: list[int], out_features: int):
        super().__init__(widths, out_features, (len(widths), out_features))

    def member_rows(self, parameter: str) -> list[int]:
        return self.widths if parameter == "weight" else [1] * self.num_members

    def forward(self, hidden_states: torch.Tensor, packed: bool = False) -> torch.Tensor:
        """(members, ..., width) -> (members, ..., out_features), for members of the same width, or packed:
        (..., sum of widths), the members' inputs side by side -> (members, ..., out_features)."""
        if packed and (not self.uniform or not self.filled):
            return self._packed(hidden_states)
        members, width = self.num_members, self.widths[0]
        if packed:
            hidden_states = hidden_states.unflatten(-1, (members, width)).movedim(-2, 0)
        return grouped_product(hidden_states, self.weight.view(members, width, self.columns), self.bias.unsqueeze(1))

    def _packed(self, hidden_states: torch.Tensor) -> torch.Tensor:
        inputs, weights = self.split(hidden_states, dim=-1), self.split(self.weight)
        outputs = {
            m: nn.functional.linear(states, weight.t(), self.bias[m])
            for m, states, weight in zip(self.filled, inputs, weights, strict=True)
        }
        # All that is left of an empty member is its bias, in the type that products have here (autocast).
        dtype = next(iter(outputs.values()), hidden_states).dtype
        for m in set(range(self.num_members)) - set(self.filled):
            outputs[m] = self.bias[m].to(dtype).expand(*hidden_states.shape[:-1], self.columns)
        return torch.stack([outputs[m] for m in range(self.num_members)])


class GroupedPooler(nn.Module):
    """A pooler per member, on the first token: (members, batch, tokens, hidden) -> (members, batch, pooled)."""

    def __init__(self, hidden_size: int, pooled_size: int, num_members: int, activation: nn.Module):
        super().__init__()
        self.dense = GroupedLinear(hidden_size, [pooled_size] * num_members)
        self.activation = activation

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.activation(self.dense(hidden_states[:, :, 0]))


def init_grouped(module: Grouped, std: float) -> None:
    """Fresh weights for a packed layer, as Transformers gives them to a linear one."""
    init.normal_(module.weight, mean=0.0, std=std)
    if module.bias is not None:
        init.zeros_(module.bias)


def joint_product(projections: Sequence[GroupedLinear], hidden_states: torch.Tensor, packed: bool) -> torch.Tensor:
    """Several projections of the same states as one product.

    (members or 1, ..., in_features) -> (members, ..., projections * width), or packed (..., projections * sum of widths)
    """
    first, count = projections[0], len(projections)
    members, widths = first.num_members, first.widths
    if packed and hidden_states.shape[0] > 1:
        # Members of different widths, each on its own input: their products are joined head by head.
        products = []
        for m in first.filled:
            own = slice(sum(widths[:m]), sum(widths[: m + 1]))
            weight = torch.cat([projection.weight[own] for projection in projections])
            bias = None
            if first.bias is not None:
                bias = torch.cat([projection.bias[own] for projection in projections])
            product = nn.functional.linear(hidden_states[m], weight, bias)
            products.append(product.view(*product.shape[:-1], count, widths[m]))
        return torch.cat(products, dim=-1).flatten(-2)
    # Packed, all members' rows are one block per projection; otherwise each member has a block of its own.
    blocks = 1 if packed else members
    weight = side_by_side([projection.weight for projection in projections], blocks).transpose(1, 2)
    bias = None
    if first.bias is not None:
        bias = side_by_side([projection.bias for projection in projections], blocks).unsqueeze(1)
    if hidden_states.shape[0] < blocks:
        hidden_states = hidden_states.expand(blocks, *hidden_states.shape[1:])
    product = grouped_product(hidden_states, weight, bias)
    return product[0] if packed else product


def side_by_side(parameters: Sequence[torch.Tensor], blocks: int) -> torch.Tensor:
    """Several parameters as one, block by block: (blocks * rows, ...) each -> (blocks, parameters * rows, ...)"""
    columns = parameters[0].shape[1:]
    return torch.cat([parameter.view(blocks, -1, *columns) for parameter in parameters], 1)


def can_join(projections: Sequence[nn.Module], hidden_states: torch.Tensor) -> bool:
    """Whether projections are their weights and nothing else: not differentiated, adapted, hooked, offloaded."""
    return is_inference(hidden_states) and all(is_bare(projection, GroupedLinear) for projection in projections)


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
        return batched_product(inputs, weight, bias)
    if bias is not None and is_plain_inference(inputs):
        products = inputs.new_empty(members, rows, weight.shape[-1])
        for m in range(members):
            torch.addmm(bias[m, 0], inputs[m], weight[m], out=products[m])
        return products
    biases = [None] * members if bias is None else bias.squeeze(1)
    return torch.stack([nn.functional.linear(inputs[m], weight[m].t(), biases[m]) for m in range(members)])


def batched_product(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`grouped_product` of (members, rows, in) with one launch."""
    if bias is None:
        return torch.bmm(inputs, weight)
    if torch.compiler.is_compiling():
        return torch.bmm(inputs, weight) + bias  # a compiler adds it in the pass that comes next
    return torch.baddbmm(bias, inputs, weight)


class PerMember(nn.ModuleList):
    """One module per member, for a part that members do not share."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """(members or 1, ...) -> (members, ...), member m through module m."""
        states = hidden_states.expand(len(self), *hidden_states.shape[1:])
        return torch.stack([module(states[m]) for m, module in enumerate(self)])

    def on_same_input(self, *args, **kwargs) -> torch.Tensor:
        """Every module on the same arguments -> (members, ...)."""
        return torch.stack([module(*args, **kwargs) for module in self])


def shared_or_per_member(build: Callable[[], nn.Module], num_members: int, shared: bool) -> nn.Module:
    """One module for all members where they share it (or are alone), one module each where they do not."""
    if shared or num_members == 1:
        return build()
    return PerMember(build() for _ in range(num_members))


def embed(embeddings: nn.Module, *args, **kwargs) -> torch.Tensor:
    """Input embeddings (members, batch, tokens, hidden); (1, batch, tokens, hidden) where members share them."""
    if isinstance(embeddings, PerMember):
        return embeddings.on_same_input(*args, **kwargs)
    return embeddings(*args, **kwargs).unsqueeze(0)
