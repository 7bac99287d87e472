"""Parts of a model whose numbers stay what they are when the model is cast."""

from collections.abc import Callable

from torch import nn


class FixedDtype(nn.Module):
    """Goes where its model goes, and keeps the dtype of its buffers: in 16 bits the frequencies of rotary positions would place
    the tokens of long texts elsewhere, and a decision's distances and thresholds would be others.

    Parameters that are loaded in 16 bits leave them in float32, too.
    """

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = getattr(self, name)
            if after.dtype != buffer.dtype:
                setattr(self, name, after.to(buffer.dtype) if buffer.is_meta else buffer.to(after.device))
        return self
