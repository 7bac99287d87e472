"""Rotary positions, whose frequencies stay what they are when a model is cast."""

from collections.abc import Callable

from torch import nn
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding


class FixedFrequencies(nn.Module):
    """Frequencies of positions keep their type: of 16 bits they would place the tokens of long texts elsewhere.

    Parameters that are loaded in 16 bits leave them in float32, too.
    """

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        before = {name: buffer for name, buffer in self.named_buffers() if buffer.is_floating_point()}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = getattr(self, name)
            if after.dtype != buffer.dtype:
                setattr(self, name, after.to(buffer.dtype) if buffer.is_meta else buffer.to(after.device))
        return self


class HydraRotaryEmbedding(FixedFrequencies, LlamaRotaryEmbedding):
    """Of causal language models of Llama's kind."""
