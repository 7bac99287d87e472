"""Splits packed layers into an `nn.Linear` for each member, for tools that know no other layer: quantisers above all."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.auto import check_has_no_adapters
from ..models.modeling_hydra import Grouped, GroupedLinear, GroupedOutput, bias_as
from .checks import check_is_in_memory, check_is_not_quantised, is_plain
from .structure import isinstance_by_name


# The maps that give the logits stay packed: they are small, and detectors read their inputs and weights.
LOGITS = ("classifier", "classifier.out_proj")


def with_linear_layers(hydra: PreTrainedModel) -> PreTrainedModel:
    """Copies a Hydra with an `nn.Linear` for each member in place of every packed layer but the last, so that tools which
    quantise or replace `nn.Linear` reach them. Experimental.

    The outputs are as before; members run one after the other. While the weights are plain, `state_dict()` has the names and
    shapes of the Hydra's, so that the ordinary Hydra is saved; once they are quantised, saving raises. A calibrated Hydra has
    to be calibrated again, best after quantising.

    Args:
        hydra (`PreTrainedModel`): a Hydra, as it was loaded or fused. It is left as it is.

    Returns:
        `PreTrainedModel`: the copy.
    """
    check_has_no_adapters(hydra, "hydra")
    check_is_in_memory(hydra, "hydra")
    check_is_not_quantised(hydra, "hydra")
    split = copy.deepcopy(hydra)
    for name, module in list(split.named_modules()):
        kind = next((new for packed, new in SPLIT.items() if isinstance_by_name(module, packed)), None)
        if kind is not None and any(module.widths) and name not in LOGITS:
            split.set_submodule(name, kind(module))
    if split.decision is not None:
        split.decision.compare_again()
    return split


class LinearPerMember(nn.Module):
    """A `GroupedLinear` with a linear layer for each member that has any width.

    linears: by the member's number
    biases: by the member's number, the biases of an output without heads
    """

    def __init__(self, packed: Grouped):
        super().__init__()
        self.widths, self.columns, self.has_bias = list(packed.widths), packed.columns, packed.bias is not None
        self.is_uniform = len(set(self.widths)) == 1
        self.filled = [m for m, width in enumerate(self.widths) if width > 0]
        own = {}
        for name, parameter in packed.named_parameters():
            for place, tensor in self.split({name: parameter.detach()}).items():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                own[place] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        self.linears, self.biases = nn.ModuleDict(), nn.ParameterDict()
        for m in range(len(self.widths)):
            if m in self.filled:
                weight = own[f"linears.{m}.weight"]
                self.linears[str(m)] = nn.Linear(*weight.t().shape, bias=self.has_bias, device="meta")
                self.linears[str(m)].weight = weight
                if self.has_bias:
                    self.linears[str(m)].bias = own[f"linears.{m}.bias"]
            elif f"biases.{m}" in own:
                self.biases[str(m)] = own[f"biases.{m}"]
        self.register_state_dict_post_hook(pack)
        self.register_load_state_dict_pre_hook(unpack)
        self.train(packed.training)

    def split(self, packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Tensors of the packed layer ("weight", "bias") by the names that their parts have here."""
        parts = {name: tensor.split(self.widths) for name, tensor in packed.items()}
        return {f"linears.{m}.{name}": by_member[m] for name, by_member in parts.items() for m in self.filled}

    def joined(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inverse of `split`."""
        names = ("weight", "bias") if self.has_bias else ("weight",)
        return {name: torch.cat([own[f"linears.{m}.{name}"] for m in self.filled]) for name in names}

    def run(self, member: int, states: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out); the layer gets (rows, in), as quantised ones may take nothing else."""
        outputs = self.linears[str(member)](states.flatten(0, -2))
        return outputs.view(*states.shape[:-1], outputs.shape[-1])

    def forward(
        self, hidden_states: torch.Tensor, rows: Sequence[slice] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As `GroupedLinear.forward`, but all rows are computed: quantised weights cannot be cut."""
        states = hidden_states.expand(len(self.widths), *hidden_states.shape[1:])
        parts = [slice(None)] * len(self.widths) if rows is None else rows
        outputs = tuple(self.run(m, states[m])[..., parts[m]] for m in self.filled)
        return torch.stack(outputs) if self.is_uniform else outputs

    def extra_repr(self) -> str:
        return f"widths={self.widths}, columns={self.columns}, bias={self.has_bias}"


class OutputPerMember(LinearPerMember):
    """The same for a `GroupedOutput`, whose weights are transposed; a member without heads keeps its bias."""

    def _bias_names(self) -> list[str]:
        return [f"linears.{m}.bias" if width else f"biases.{m}" for m, width in enumerate(self.widths)]

    def split(self, packed: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {}
        if "weight" in packed:
            weights = packed["weight"].split(self.widths)
            own |= {f"linears.{m}.weight": weights[m].t() for m in self.filled}
        if "bias" in packed:
            own |= dict(zip(self._bias_names(), packed["bias"], strict=True))
        return own

    def joined(self, own: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        packed = {"weight": torch.cat([own[f"linears.{m}.weight"].t() for m in self.filled])}
        return packed | ({"bias": torch.stack([own[name] for name in self._bias_names()])} if self.has_bias else {})

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As `GroupedOutput.forward`."""
        by_member = hidden_states if self.is_uniform else hidden_states.split(self.widths, -1)
        products = {m: self.run(m, by_member[m]) for m in self.filled}
        like, biases = products[self.filled[0]], dict(self.biases)
        return torch.stack(
            [products[m] if width else bias_as(like, biases.get(str(m))) for m, width in enumerate(self.widths)]
        )


# By kind of packed layer. Tables, such as those of distances, stay packed.
SPLIT = {GroupedLinear: LinearPerMember, GroupedOutput: OutputPerMember}


# Saved and loaded as the packed layer


def pack(module: LinearPerMember, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    for m, linear in module.linears.items():
        if type(linear) is not nn.Linear or not all(map(is_plain, linear.parameters())):
            raise ValueError(
                f"{prefix}linears.{m} is quantised or replaced: save the Hydra before it is quantised, and quantise it again "
                "where it is loaded"
            )
    own = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    state_dict.update({f"{prefix}{name}": tensor for name, tensor in module.joined(own).items()})


def unpack(module: LinearPerMember, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    packed = {name: state_dict.pop(prefix + name) for name in ("weight", "bias") if prefix + name in state_dict}
    state_dict.update({f"{prefix}{place}": tensor for place, tensor in module.split(packed).items()})
