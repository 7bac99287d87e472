"""The costs of a candidate on this machine, beside one model: time, memory, multiply-adds, parameters."""

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

from ..cost import (
    count_multiply_adds,
    count_parameters,
    inputs_for,
    median_milliseconds,
    wait_for,
)
from ..data.prediction import device_of, evaluation_mode


MEGABYTE = 2**20


def machine_of(model: nn.Module) -> str:
    """Names the machine that a time was measured on."""
    device = device_of(model)
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{platform.node()}, {device.type}, {torch.get_num_threads()} threads, torch {torch.__version__}"


@dataclass
class Costs:
    """The costs of models beside one model, of which nothing but the time is measured twice.

    single: the one model
    batch_size: of what is measured
    seconds: about how long to measure times, for a model and the one together
    """

    single: nn.Module
    batch_size: int
    seconds: float

    def of(self, model: nn.Module) -> dict[str, float]:
        """The costs that a `Candidate` has; both models run in turns, so that whatever slows the machine slows both."""
        own = self._counted_once if model is self.single else self._counted(model)
        relative = {name: own[name] / self._counted_once[name] for name in own}
        milliseconds, times = self.milliseconds(model)
        return {**relative, "time": times, "milliseconds": milliseconds, "megabytes": own["memory"] / MEGABYTE}

    def milliseconds(self, model: nn.Module) -> tuple[float, float]:
        """Of a batch, and as a multiple of the one model's."""
        found = median_milliseconds({"single": self.single, "model": model}, self.inputs, self.seconds)
        return found["model"], 1.0 if model is self.single else found["model"] / found["single"]

    @cached_property
    def inputs(self) -> dict[str, Tensor]:
        return inputs_for(self.single, self.batch_size)

    @cached_property
    def _counted_once(self) -> dict[str, int]:
        return self._counted(self.single)

    def _counted(self, model: nn.Module) -> dict[str, int]:
        counts = {"multiply_adds": count_multiply_adds(model), "parameters": count_parameters(model)}
        return counts | {"memory": peak_bytes(model, self.inputs)}


def peak_bytes(model: nn.Module, inputs: Mapping[str, Tensor]) -> int:
    """Weights, and the most bytes of other tensors that are alive at once in a forward.

    On a GPU as its allocator counts them; elsewhere, where no allocator does, those of the tensors that operations
    return.
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
    """Counts the bytes of tensors that operations make, as long as these live."""

    def __init__(self):
        super().__init__()
        self.living: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        result = function(*arguments, **(keywords or {}))
        self.living = {place: entry for place, entry in self.living.items() if not entry[0].expired()}
        given = {_place(tensor) for tensor in tree_leaves((arguments, keywords)) if isinstance(tensor, Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and _place(tensor) not in given:
                storage = tensor.untyped_storage()
                self.living[_place(tensor)] = StorageWeakRef(storage), storage.nbytes()
        self.peak = max(self.peak, sum(size for _, size in self.living.values()))
        return result


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
