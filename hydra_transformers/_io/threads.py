"""What keeps threads of a serving process out of each other's passes."""

import threading
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn


# Held during a pass that needs what a process has once: an active adapter, PEFT's cache of adapted weights, seeded random
# numbers.
ONE_PASS = threading.RLock()

# What every module has of its own: parameters, buffers, children, hooks.
OF_EVERY_MODULE = {name for name, value in vars(nn.Module()).items() if isinstance(value, (dict, set))}


def twin_of(model: nn.Module) -> nn.Module:
    """A model of the same weights, buffers and hooks, whose modes and settings are its own.

    What is set on a module of the twin (`training`, a dropout's `p`) is not set on the model: threads that use the model,
    or twins of it, do not notice. It takes a few milliseconds, and no memory for weights.
    """
    twins = {module: object.__new__(type(module)) for module in model.modules()}
    for module, twin in twins.items():
        attributes = vars(module)
        if isinstance(attributes.get("forward"), FunctionType):
            raise TypeError(
                f"the forward of a {type(module).__name__} was replaced by a function that belongs to this very module, "
                "as torch.compile does: pass the model as it was before"
            )
        own = {name: attributes[name].copy() for name in OF_EVERY_MODULE if name in attributes}
        vars(twin).update({name: _of_twins(own.get(name, value), twins) for name, value in attributes.items()})
        vars(twin)["_compiled_call_impl"] = None  # it would call the model
    return twins[model]


def _of_twins(value: Any, twins: dict[nn.Module, nn.Module]) -> Any:
    """`value` with twins in place of modules; the very same where there are none in it."""
    if value is None or isinstance(value, (bool, int, float, str)) or (isinstance(value, dict) and not value):
        return value
    if isinstance(value, nn.Module):
        return twins.get(value, value)
    if type(value) is partial:  # the forward of a module that is spread over devices
        return partial(_of_twins(value.func, twins), *_of_twins(value.args, twins), **_of_twins(value.keywords, twins))
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _of_twins(value.__self__, twins))
    if isinstance(value, dict):
        parts = {key: _of_twins(part, twins) for key, part in value.items()}
        return value if _are_same(parts.values(), value.values()) else value.copy() | parts
    if type(value) in (list, tuple):
        parts = [_of_twins(part, twins) for part in value]
        return value if _are_same(parts, value) else type(value)(parts)
    return value


def _are_same(first: Any, second: Any) -> bool:
    return all(one is other for one, other in zip(first, second, strict=True))
