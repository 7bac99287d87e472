"""Lets threads use one model without changing its settings under each other."""

import threading
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn


# Held during a forward pass that uses global state: the active adapter, PEFT's cache of adapted
# weights, seeded randomness.
ONE_PASS = threading.RLock()

# Containers that every module has: parameters, buffers, children, hooks.
OF_EVERY_MODULE = {name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))}


def copy_sharing_weights(model: nn.Module) -> nn.Module:
    """Copy a model: the same parameters, buffers and hooks, but modes and settings of its own.

    A setting of the copy (`training`, a dropout's `p`) is invisible to threads that use the model.
    It takes a few milliseconds, and no memory for weights.
    """
    copies = {module: object.__new__(type(module)) for module in model.modules()}
    for module, copied in copies.items():
        attributes = vars(module)
        if isinstance(attributes.get("forward"), FunctionType):
            raise TypeError(
                f"the forward of a {type(module).__name__} was replaced by a function that belongs to this very "
                "module, as torch.compile does: pass the model as it was before"
            )

        # Containers are copied even where nothing in them changes: the copy may register hooks.
        for name, value in attributes.items():
            if name in OF_EVERY_MODULE:
                value = value.copy()
            vars(copied)[name] = _with_copies(value, copies)
        vars(copied)["_compiled_call_impl"] = None  # it would call the model
    return copies[model]


def _with_copies(value: Any, copies: dict[nn.Module, nn.Module]) -> Any:
    """Return `value` with copies in place of modules; the very same where it holds no module."""
    if value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, dict) and not value):
        return value

    # Modules, and what calls them.
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _with_copies(value.__self__, copies))
    if type(value) is partial:  # the forward of a module that is spread over devices
        function, *arguments = _with_copies((value.func, *value.args), copies)
        keywords = _with_copies(value.keywords, copies)
        return partial(function, *arguments, **keywords)

    # Containers.
    if isinstance(value, dict):
        parts = {key: _with_copies(part, copies) for key, part in value.items()}
        if _are_same(parts.values(), value.values()):
            return value
        return value.copy() | parts  # a copy of its own type
    if type(value) in (list, tuple):
        parts = [_with_copies(part, copies) for part in value]
        if _are_same(parts, value):
            return value
        return type(value)(parts)
    return value


def _are_same(first: Any, second: Any) -> bool:
    """Whether two containers hold the same objects in the same order."""
    return all(one is other for one, other in zip(first, second, strict=True))
