"""Splits packed layers into an `nn.Linear` for each member, for tools that know no other layer: quantisers above all."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..models.modeling_hydra import Grouped, GroupedLinear, GroupedOutput, bias_as
from .checks import check_can_be_read
from .structure import isinstance_by_name


# The maps that give the logits stay packed: they are small, and detectors read their inputs and weights.
LOGITS = ("classifier", "classifier.out_proj")


def with_linear_layers(hydra: PreTrainedModel) -> PreTrainedModel:
    """Copies a Hydra with an `nn.Linear` for each member in place of every packed layer but the last, so that tools which
    quantise or replace `nn.Linear` reach them. Experimental.

    The outputs are as before; members run one after the other. The copy cannot be saved: save the Hydra, and split it again
    where it is loaded. A calibrated Hydra has to be calibrated again, best after quantising.

    Args:
        hydra (`PreTrainedModel`): a Hydra, as it was loaded or fused. It is left as it is.

    Returns:
        `PreTrainedModel`: the copy.
    """
    check_can_be_read(hydra, "hydra")
    split = copy.deepcopy(hydra)
    for name, module in list(split.named_modules()):
        kind = next((new for packed, new in SPLIT.items() if isinstance_by_name(module, packed)), None)
        if kind is not None and any(module.widths) and name not in LOGITS:
            split.set_submodule(name, kind(module))
    if split.decision is not None:
        split.decision.compare_again()
    return split


class LinearPerMember(nn.Module):
    """A `GroupedLinear` with a linear layer for each member that has any width, by the member's number."""

    def __init__(self, packed: Grouped):
        super().__init__()
        self.widths, self.is_uniform, self.filled = packed.widths, packed.is_uniform, packed.with_rows()[0]
        weights, biases = self.parts(packed)
        self.linears = nn.ModuleDict({str(m): _linear(weights[m], biases[m]) for m in self.filled})
        self.register_state_dict_pre_hook(_refuse_to_save)
        self.train(packed.training)

    def parts(self, packed: Grouped) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        """The weight and bias of each member."""
        no_biases = [None] * len(self.widths)
        return packed.weight.split(self.widths), no_biases if packed.bias is None else packed.bias.split(self.widths)

    def run(self, member: int, states: Tensor) -> Tensor:
        """(..., in) -> (..., out); the layer gets (rows, in), as quantised ones may take nothing else."""
        outputs = self.linears[str(member)](states.flatten(0, -2))
        return outputs.view(*states.shape[:-1], outputs.shape[-1])

    def forward(self, hidden_states: Tensor, rows: Sequence[slice] | None = None) -> Tensor | tuple[Tensor, ...]:
        """As `GroupedLinear.forward`, but all rows are computed: quantised weights cannot be cut."""
        states = hidden_states.expand(len(self.widths), *hidden_states.shape[1:])
        parts = [slice(None)] * len(self.widths) if rows is None else rows
        outputs = tuple(self.run(m, states[m])[..., parts[m]] for m in self.filled)
        return torch.stack(outputs) if self.is_uniform else outputs


class OutputPerMember(LinearPerMember):
    """The same for a `GroupedOutput`, whose weights are transposed; a member without heads keeps its bias."""

    def __init__(self, packed: Grouped):
        super().__init__(packed)
        self.bias = packed.bias

    def parts(self, packed: Grouped) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
        weights = [weight.t() for weight in packed.weight.split(self.widths)]
        return weights, [None] * len(weights) if packed.bias is None else packed.bias

    def forward(self, hidden_states: Tensor) -> Tensor:
        """As `GroupedOutput.forward`."""
        by_member = hidden_states if self.is_uniform else hidden_states.split(self.widths, -1)
        products = {m: self.run(m, by_member[m]) for m in self.filled}
        like, biases = products[self.filled[0]], [None] * len(self.widths) if self.bias is None else self.bias
        return torch.stack([products[m] if m in products else bias_as(like, bias) for m, bias in enumerate(biases)])


# By kind of packed layer. Tables, such as those of distances, stay packed.
SPLIT = {GroupedLinear: LinearPerMember, GroupedOutput: OutputPerMember}


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(*weight.t().shape, bias=bias is not None, device="meta")
    for name, tensor in {"weight": weight, "bias": bias}.items():
        if tensor is not None:
            tensor_copy = tensor.detach().clone(memory_format=torch.contiguous_format)
            setattr(linear, name, nn.Parameter(tensor_copy, requires_grad=tensor.requires_grad))
    return linear


def _refuse_to_save(module: LinearPerMember, *_: Any) -> None:
    raise ValueError(
        "a Hydra with linear layers cannot be saved: save the Hydra itself, and split it where it is loaded"
    )
