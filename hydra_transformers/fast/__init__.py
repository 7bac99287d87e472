"""A faster way through the layers of installed models in plain inference; importing it lets them use it.

Saved models do not take it along: loaded by remote code where this package is not installed, they call their layers.
"""

from ..models.modeling_hydra import set_fast_layers
from .layers import fast_layers


set_fast_layers(fast_layers)

__all__ = ["fast_layers"]
