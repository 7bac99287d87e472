"""The costs of a candidate on this machine, relative to one model: time, memory, multiply-adds, parameters."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..cost import count_multiply_adds, count_parameters, inputs_for, median_milliseconds, wait_for
from ..data.prediction import device_of, evaluation_mode


def machine_of(model: nn.Module) -> str:
    """Names the machine that times are measured on."""
    device = device_of(model)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.node()}, {device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@dataclass
class Costs:
    """Measures models beside one model.

    single: the one model
    batch_size: rows of the batch that is measured
    seconds: about how long to measure the time of a model and of the one together
    """

    single: nn.Module
    batch_size: int
    seconds: float

    def of(self, model: nn.Module) -> dict[str, float]:
        """The costs of a `Candidate`."""
        own = self._counts_of_single if model is self.single else self._counts(model)
        relative = {name: own[name] / self._counts_of_single[name] for name in own}
        milliseconds, times = self.milliseconds(model)
        return {**relative, "time": times, "milliseconds": milliseconds, "megabytes": own["memory"] / 2**20}

    def milliseconds(self, model: nn.Module) -> tuple[float, float]:
        """For a batch, and relative to the one model; both run in turns, so that a slow machine slows both."""
        found = median_milliseconds({"single": self.single, "model": model}, self.inputs, self.seconds)
        return found["model"], 1.0 if model is self.single else found["model"] / found["single"]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return inputs_for(self.single, self.batch_size)

    @cached_property
    def _counts_of_single(self) -> dict[str, int]:
        return self._counts(self.single)

    def _counts(self, model: nn.Module) -> dict[str, int]:
        counts = {"multiply_adds": count_multiply_adds(model), "parameters": count_parameters(model)}
        return counts | {"memory": peak_bytes(model, self.inputs)}


def peak_bytes(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Bytes of the weights, and the peak of other tensors that are alive at once in a forward.

    On a GPU from its allocator; elsewhere counted from the tensors that operations return.
    """
    device = device_of(model)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    weights = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    with evaluation_mode(model), torch.inference_mode():
        if device.type == "cuda":
            wait_for(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            model(**inputs)
            wait_for(device)
            return weights + torch.cuda.max_memory_allocated(device) - before
        with _LivingTensors() as living:
            model(**inputs)
    return weights + living.peak


class _LivingTensors(TorchDispatchMode):
    """Counts the bytes of tensors from operations while they are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        self.living = {key: entry for key, entry in self.living.items() if not entry[0].expired()}
        given = {_storage_key(each) for each in tree_leaves((arguments, keywords)) if isinstance(each, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _storage_key(tensor) not in given:
                storage = tensor.untyped_storage()
                self.living[_storage_key(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.living.values()))
        return result


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
