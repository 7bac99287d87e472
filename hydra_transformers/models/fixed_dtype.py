"""Modules whose buffers keep their dtype."""

from collections.abc import Callable

from torch import nn


class FixedDtype(nn.Module):
    """Buffers keep their dtype under `.to()`: in 16 bits, rotary frequencies would move the tokens
    of long texts, and a decision's thresholds would change."""

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        before = dict(self.named_buffers())
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = getattr(self, name)
            if after.dtype == buffer.dtype:
                continue
            if buffer.is_meta:
                setattr(self, name, after.to(buffer.dtype))
            else:
                setattr(self, name, buffer.to(after.device))
        return self
