"""What normalises states."""

import torch
from torch import nn

from .configuration_hydra import Anatomy


class HydraRMSNorm(nn.Module):
    """Root mean square normalisation as Llama has it: in float32, and back in the states' own type times the weight."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.weight * self.normalised(hidden_states).to(hidden_states.dtype)

    def normalised(self, hidden_states: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states.float()
        return hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.eps)

    def extra_repr(self) -> str:
        return f"{tuple(self.weight.shape)}, eps={self.eps}"


class HydraOffsetRMSNorm(HydraRMSNorm):
    """As Gemma has it: the weight counts from one, and the product is taken in float32 as well."""

    def __init__(self, hidden_size: int, eps: float):
        super().__init__(hidden_size, eps)
        nn.init.zeros_(self.weight)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return (self.normalised(hidden_states) * (1 + self.weight.float())).to(hidden_states.dtype)


RMS_NORMS = {"rms_norm": HydraRMSNorm, "offset_rms_norm": HydraOffsetRMSNorm}


def norm_of(anatomy: Anatomy, hidden_size: int) -> nn.Module:
    """A norm of states (..., hidden_size), as an anatomy has them."""
    if anatomy.norm == "layer_norm":
        return nn.LayerNorm(hidden_size, eps=anatomy.norm_eps, bias=anatomy.norm_bias)
    return RMS_NORMS[anatomy.norm](hidden_size, eps=anatomy.norm_eps)
