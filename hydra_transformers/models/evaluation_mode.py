"""Eval mode for a while, whoever else uses the model meanwhile."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


# The modules that are kept in eval mode: the mode each goes back to, and for how many callers it is kept.
_modes_before: dict[nn.Module, tuple[bool, int]] = {}
_modes_lock = threading.RLock()


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode inside; on leaving, every module is back in the mode it was in. Of several threads, the last to leave
    puts it back."""
    modules = list(model.modules())
    with _modes_lock:
        for module in modules:
            before, callers = _modes_before.get(module, (module.training, 0))
            _modes_before[module] = (before, callers + 1)
        model.eval()
    try:
        yield
    finally:
        with _modes_lock:
            for module in modules:
                before, callers = _modes_before.pop(module)
                if callers > 1:
                    _modes_before[module] = (before, callers - 1)
                else:
                    module.training = before
