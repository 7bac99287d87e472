"""Packed layers taken apart into an `nn.Linear` for each member, for tools that know no other layer: quantisers above all."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ..models.auto import check_has_no_adapters
from ..models.modeling_hydra import Grouped, GroupedOutput, bias_as
from .reading import check_is_in_memory, check_is_not_quantised, holds_its_numbers
from .structure import is_a


# The maps that give the logits stay packed: they are small, and detectors read their inputs and weights.
LOGITS = ("classifier", "classifier.out_proj")


def with_linear_layers(hydra: PreTrainedModel) -> PreTrainedModel:
    """A copy of a Hydra that has an `nn.Linear` for each member in place of every packed layer but the one that gives the
    logits, so that whatever quantises or replaces `nn.Linear` reaches them; `hydra` is left as it is.

    It answers as before, one member after the other. While its weights are plain, its `state_dict()` has the names and
    shapes of the Hydra's, so that what it saves is the ordinary Hydra; once they are quantised, saving is refused. A
    calibrated one decides nothing before it is calibrated again, which is best done when it is quantised.
    """
    if not any(is_a(module, Grouped) for module in hydra.modules()):
        raise TypeError(
            f"hydra is a {type(hydra).__name__} without packed layers: pass a Hydra, as it was loaded or fused"
        )
    check_has_no_adapters(hydra, "hydra")
    check_is_in_memory(hydra, "hydra")
    check_is_not_quantised(hydra, "hydra")
    apart = copy.deepcopy(hydra)
    for name, module in list(apart.named_modules()):
        if is_a(module, Grouped) and any(module.widths) and name not in LOGITS:
            kind = OutputPerMember if is_a(module, GroupedOutput) else LinearPerMember
            apart.set_submodule(name, kind(module))
    if apart.decision is not None:
        apart.decision.seen = None  # the packed weights would count as its own
    return apart


Tensors = dict[str, torch.Tensor]


class TakenApart(nn.Module):
    """What both kinds have in common: `linears`, by number, the map of each member that has any width, and `biases`, what is
    left of the others' where they have one."""

    def __init__(self, packed: Grouped):
        super().__init__()
        self.widths, self.columns, self.has_bias = list(packed.widths), packed.columns, packed.bias is not None
        self.filled = [m for m, width in enumerate(self.widths) if width > 0]
        own = {}
        for name, parameter in packed.named_parameters():
            for place, tensor in self.apart({name: parameter.detach()}).items():
                tensor = tensor.clone(memory_format=torch.contiguous_format)
                own[place] = nn.Parameter(tensor, requires_grad=parameter.requires_grad)
        self.linears = nn.ModuleDict(
            {str(m): linear(own[f"linears.{m}.weight"], own.get(f"linears.{m}.bias")) for m in self.filled}
        )
        alone = {place: tensor for place, tensor in own.items() if place.startswith("biases.")}
        self.biases = nn.ParameterDict({place.removeprefix("biases."): tensor for place, tensor in alone.items()})
        self.register_state_dict_post_hook(pack)
        self.register_load_state_dict_pre_hook(unpack)
        self.train(packed.training)

    @property
    def is_uniform(self) -> bool:
        return len(set(self.widths)) == 1

    def apart(self, packed: Tensors) -> Tensors:
        """The tensors of a packed layer, or some of them, by the names that they have here."""
        raise NotImplementedError

    def packed(self, apart: Tensors) -> Tensors:
        """And back: "weight" and, where there is one, "bias"."""
        raise NotImplementedError

    def of_member(self, member: int, states: torch.Tensor) -> torch.Tensor:
        """(..., in) -> (..., out); the map gets (rows, in), as what stands in for a linear layer may know nothing else."""
        outputs = self.linears[str(member)](states.flatten(0, -2))
        return outputs.view(*states.shape[:-1], outputs.shape[-1])

    def extra_repr(self) -> str:
        return f"widths={self.widths}, columns={self.columns}, bias={self.has_bias}"


class LinearPerMember(TakenApart):
    """A `GroupedLinear` taken apart."""

    def apart(self, packed: Tensors) -> Tensors:
        parts = {name: tensor.split(self.widths) for name, tensor in packed.items()}
        return {f"linears.{m}.{name}": by_member[m] for name, by_member in parts.items() for m in self.filled}

    def packed(self, apart: Tensors) -> Tensors:
        names = ("weight", "bias") if self.has_bias else ("weight",)
        return {name: torch.cat([apart[f"linears.{m}.{name}"] for m in self.filled]) for name in names}

    def forward(
        self, hidden_states: torch.Tensor, rows: Sequence[slice] | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """As `GroupedLinear.forward`. All rows are computed, also where `rows` asks for a part: quantised weights cannot be
        cut."""
        states = hidden_states.expand(len(self.widths), *hidden_states.shape[1:])
        parts = [slice(None)] * len(self.widths) if rows is None else rows
        outputs = tuple(self.of_member(m, states[m])[..., parts[m]] for m in self.filled)
        return torch.stack(outputs) if self.is_uniform else outputs


class OutputPerMember(TakenApart):
    """A `GroupedOutput` taken apart; of a member without heads its bias is left."""

    def apart(self, packed: Tensors) -> Tensors:
        tensors = {}
        if "weight" in packed:
            weights = packed["weight"].split(self.widths)
            tensors |= {f"linears.{m}.weight": weights[m].t() for m in self.filled}
        if "bias" in packed:
            places = [f"linears.{m}.bias" if width else f"biases.{m}" for m, width in enumerate(self.widths)]
            tensors |= dict(zip(places, packed["bias"], strict=True))
        return tensors

    def packed(self, apart: Tensors) -> Tensors:
        weights = [apart[f"linears.{m}.weight"].t() for m in self.filled]
        if not self.has_bias:
            return {"weight": torch.cat(weights)}
        biases = [apart[f"linears.{m}.bias" if width else f"biases.{m}"] for m, width in enumerate(self.widths)]
        return {"weight": torch.cat(weights), "bias": torch.stack(biases)}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """As `GroupedOutput.forward`."""
        by_member = hidden_states if self.is_uniform else hidden_states.split(self.widths, -1)
        products = {m: self.of_member(m, by_member[m]) for m in self.filled}
        like, biases = products[self.filled[0]], dict(self.biases)
        return torch.stack(
            [products[m] if width else bias_as(like, biases.get(str(m))) for m, width in enumerate(self.widths)]
        )


def linear(weight: nn.Parameter, bias: nn.Parameter | None) -> nn.Linear:
    """An `nn.Linear` of these very parameters."""
    module = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
    module.weight = weight
    if bias is not None:
        module.bias = bias
    return module


# Saved and loaded as the packed layer


def pack(module: TakenApart, state_dict: dict[str, Any], prefix: str, local_metadata: dict) -> None:
    """Puts the packed tensors in the place of the members' own."""
    for m in module.filled:
        own = module.linears[str(m)]
        if type(own) is not nn.Linear or not all(map(holds_its_numbers, own.parameters())):
            raise ValueError(
                f"{prefix}linears.{m} is quantised or replaced: save the Hydra before it is quantised, and quantise it again "
                "where it is loaded"
            )
    apart = {name.removeprefix(prefix): state_dict.pop(name) for name in list(state_dict) if name.startswith(prefix)}
    state_dict.update({f"{prefix}{name}": tensor for name, tensor in module.packed(apart).items()})


def unpack(module: TakenApart, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Deals the packed tensors out to the members; what is missing or too much is for the caller to say."""
    packed = {name: state_dict.pop(prefix + name) for name in ("weight", "bias") if prefix + name in state_dict}
    state_dict.update({f"{prefix}{place}": tensor for place, tensor in module.apart(packed).items()})
