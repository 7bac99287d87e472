"""Refuses models that compute something else than their class and config say: a Hydra takes over weights and config alone."""

import copy
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from .structure import outline


# Packages whose forwards a Hydra reproduces, and whose hooks only record outputs or move tensors between devices.
FORWARDS_OF = ("torch", "transformers", "transformers_modules", "hydra_transformers", "accelerate")
HOOKS_OF = ("transformers", "accelerate")
# Attributes that weights show by their shapes, that old head pruning changes, or that only training and losses read.
NOT_COMPARED = {
    *(
        "all_head_size",
        "embed_dim",
        "dim",
        "in_features",
        "out_features",
        "num_embeddings",
        "vocab_size",
        "padding_idx",
    ),
    *("n_heads", "num_attention_heads", "num_heads", "num_labels", "loss_type", "name_or_path"),
    *("gradient_checkpointing", "training"),
}
# Parameters that no answer depends on: poolers that the task does not use, and tokens that hide patches in pre-training.
UNUSED = ("pooler", "mask_token")


def check_computes_as_its_class(cls: type, model: PreTrainedModel, name: str) -> None:
    """Refuses hooks, custom forwards, and parts or settings that differ from a new model of this class and config.

    cls: the Hydra class that is to be built from `model`
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for path, module in modules.items():
        _check_hooks_and_forward(module, path, name)
    for path, expected in _new_model(cls, model).named_modules(remove_duplicate=False):
        if path.partition(".")[0] != "decision":  # added by calibration, and left out by fusion
            _check_same_part(modules.get(path), expected, path, name, type(model))


def check_is_all_read(cls: type, model: PreTrainedModel, read: Iterable[str], name: str) -> None:
    """Refuses a backbone with parameters that were not read: they would be lost."""
    known = set(read)
    for key, _ in model.named_parameters():
        if key not in known and not key.startswith(cls.unread) and not any(part in key for part in UNUSED):
            raise ValueError(
                f"{name} ({type(model).__name__}) has the parameter {key!r}, which {cls.__name__} does not know and would leave "
                "out: merge or remove what was added to the model"
            )


def _new_model(cls: type, model: PreTrainedModel) -> PreTrainedModel:
    """A model without weights of the same class and config, as Transformers (or the code of a Hydra) makes it."""
    model_class = next((each for each in type(model).__mro__ if each in cls.backbone_classes), type(model))
    options = {}
    if "add_pooling_layer" in inspect.signature(model_class.__init__).parameters:
        options["add_pooling_layer"] = getattr(model, "pooler", None) is not None
    config = model.config
    if getattr(config, "decision", None) is not None:
        config = copy.copy(config)
        config.decision = None
    return outline(model_class, config, **options)


def _check_hooks_and_forward(module: nn.Module, path: str, name: str) -> None:
    for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
        if _package_of(hook) not in HOOKS_OF:
            raise ValueError(
                f"{name} has a forward hook on {path or 'itself'} ({_name_of(hook)}), which its Hydra would not have: remove it "
                "(handle.remove(), or leave the block that added it)"
            )
    own = vars(module).get("forward")
    forward = type(module).forward if own is None or hasattr(module, "_hf_hook") else own
    if _package_of(forward) not in FORWARDS_OF:
        raise ValueError(
            f"{name} has a forward of its own ({_name_of(forward)} of {_module_of(forward)}, in {path or type(module).__name__}), "
            "and a Hydra computes what the classes of Transformers compute: pass the weights in a model of those"
        )


def _check_same_part(module: nn.Module | None, expected: nn.Module, path: str, name: str, model_class: type) -> None:
    new = f"a new {model_class.__name__} of its config"
    # The model itself may be of a subclass: its forward was checked.
    if not (isinstance(module, type(expected)) if path == "" else type(module) is type(expected)):
        found = "nothing" if module is None else f"a {type(module).__name__}"
        raise ValueError(
            f"{name} has {found} at {path}, where {new} has a {type(expected).__name__}: merge or undo what was replaced "
            "(or put the config right), so that its Hydra computes the same"
        )
    if "drop" in type(expected).__name__.lower():
        return
    for key, value in vars(expected).items():
        if key in NOT_COMPARED or key.startswith("_") or "drop" in key:
            continue
        found = vars(module).get(key)
        if not _is_same_setting(found, value):
            shown = [_name_of(each) if callable(each) else repr(each) for each in (found, value)]
            raise ValueError(
                f"{name} has {'.'.join(filter(None, (path, key)))} = {shown[0]}, where {new} has {shown[1]}: set both alike, "
                "so that its Hydra computes the same"
            )


def _is_same_setting(found: Any, expected: Any) -> bool:
    """Compares numbers, texts and functions; anything else counts as the same."""
    if inspect.isroutine(expected):
        return getattr(found, "__func__", found) == getattr(expected, "__func__", expected)
    if isinstance(expected, partial):
        return isinstance(found, partial) and (found.func, found.keywords) == (expected.func, expected.keywords)
    if isinstance(expected, (bool, int, float, str, tuple)):
        return type(found) is type(expected) and found == expected
    return True


def _package_of(function: Callable) -> str:
    return _module_of(function).partition(".")[0]


def _module_of(function: Callable) -> str:
    """The module that defines a function."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(function, "__module__", None) or type(function).__module__


def _name_of(function: Callable) -> str:
    return getattr(function, "__qualname__", type(function).__name__)
