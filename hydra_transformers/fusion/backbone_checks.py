"""Refuses models that compute something else than their class and config say: a Hydra takes over weights and config alone."""

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .structure import outline


# Whose forwards a Hydra computes the same as, and whose hooks only record outputs or move tensors between devices.
FORWARDS_OF = ("torch", "transformers", "transformers_modules", "hydra_transformers", "accelerate")
HOOKS_OF = ("transformers", "accelerate")
# Attributes that weights show by their shapes, that old head pruning changes, or that only training and losses read.
NOT_COMPARED = {
    "all_head_size",
    "embed_dim",
    "dim",
    "gradient_checkpointing",
    "in_features",
    "loss_type",
    "n_heads",
    "name_or_path",
    "num_attention_heads",
    "num_embeddings",
    "num_heads",
    "num_labels",
    "out_features",
    "padding_idx",
    "training",
    "vocab_size",
}
# Parameters that no answer depends on: poolers which the task has no use for, and what hides patches in pre-training.
UNUSED = ("pooler", "mask_token")


def check_computes_as_its_class(cls: type, model: PreTrainedModel, name: str) -> None:
    """Refuses hooks, a forward of the user's own, and parts and settings that a new model of this class and config has not.

    cls: the Hydra class that is to be built from `model`
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        _check_hooks(module, path, name)
        _check_forward(module, path, name)
    for path, expected in _newly_made(cls, model).named_modules(remove_duplicate=False):
        if path.partition(".")[0] != "decision":  # which calibration adds, and fusion leaves behind
            _check_alike(modules.get(path), expected, path, name, type(model))


def check_is_all_read(cls: type, model: PreTrainedModel, read: Iterable[str], name: str) -> None:
    """Refuses a backbone with parameters that are not among those that were read: they would be lost."""
    known = set(read)
    for key, _ in model.named_parameters():
        if key not in known and not key.startswith(cls.unread) and not any(part in key for part in UNUSED):
            raise ValueError(
                f"{name} ({type(model).__name__}) has the parameter {key!r}, which {cls.__name__} does not know and would leave "
                "out: merge or remove what was added to the model"
            )


def _newly_made(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """A model without weights of the same class and config, as Transformers (or the code of a Hydra) makes it."""
    made_class = next((each for each in type(model).__mro__ if each in cls.backbone_classes), type(model))
    options = {}
    if "add_pooling_layer" in inspect.signature(made_class.__init__).parameters:
        options["add_pooling_layer"] = getattr(model, "pooler", None) is not None
    config = model.config
    if getattr(config, "decision", None) is not None:
        config = copy.copy(config)
        config.decision = None
    return outline(made_class, config, **options)


def _check_hooks(module: nn.Module, path: str, name: str) -> None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if not _is_from(HOOKS_OF, hook):
            raise ValueError(
                f"{name} has a forward hook on {path or 'itself'} ({_name_of(hook)}), which its Hydra would not have: remove it "
                "(handle.remove(), or leave the block that added it)"
            )


def _check_forward(module: nn.Module, path: str, name: str) -> None:
    own = vars(module).get("forward")
    forward = type(module).forward if own is None or hasattr(module, "_hf_hook") else own
    if not _is_from(FORWARDS_OF, forward):
        raise ValueError(
            f"{name} has a forward of its own ({_name_of(forward)} of {_origin(forward)}, in {path or type(module).__name__}), and a "
            "Hydra computes what the classes of Transformers compute: pass the weights in a model of those"
        )


def _check_alike(module: nn.Module | None, expected: nn.Module, path: str, name: str, model_class: type) -> None:
    made = f"a new {model_class.__name__} of its config"
    # The model itself may be of a subclass: its forward was looked at.
    if not (isinstance(module, type(expected)) if path == "" else type(module) is type(expected)):
        found = "nothing" if module is None else f"a {type(module).__name__}"
        raise ValueError(
            f"{name} has {found} at {path}, where {made} has a {type(expected).__name__}: merge or undo what was replaced "
            "(or put the config right), so that its Hydra computes the same"
        )
    if "drop" in type(expected).__name__.lower():
        return
    for key, value in vars(expected).items():
        if not _is_compared(key, value):
            continue
        found = vars(module).get(key)
        if not _is_equal(found, value):
            raise ValueError(
                f"{name} has {'.'.join(filter(None, (path, key)))} = {_shown(found)}, where {made} has {_shown(value)}: set both alike, so "
                "that its Hydra computes the same"
            )


def _is_compared(key: str, value: Any) -> bool:
    if key in NOT_COMPARED or key.startswith("_") or "drop" in key:
        return False
    return isinstance(value, (bool, int, float, str, tuple)) or inspect.isroutine(value) or isinstance(value, partial)


def _is_equal(found: Any, expected: Any) -> bool:
    if inspect.isroutine(expected):
        return getattr(found, "__func__", found) == getattr(expected, "__func__", expected)
    if isinstance(expected, partial):
        return isinstance(found, partial) and (found.func, found.keywords) == (expected.func, expected.keywords)
    return type(found) is type(expected) and found == expected


def _is_from(packages: tuple[str, ...], function: Callable) -> bool:
    return _origin(function).partition(".")[0] in packages


def _origin(function: Callable) -> str:
    """The module in which a function is defined."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__module__", None) or type(function).__module__


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _shown(value: Any) -> str:
    return _name_of(value) if callable(value) else repr(value)
