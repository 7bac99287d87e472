"""Seeded random numbers that other threads do not disturb."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from .._io.threads import ONE_PASS


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """Seed the CPU and the model's GPUs inside, and restore their random states afterwards.

    On the CPU, numbers come from a generator of this thread's own. A GPU's fused kernels use its
    one global generator: there, this package's threads wait for each other, and others should not
    draw meanwhile.
    """
    tensors = chain(model.parameters(), model.buffers())
    devices = {tensor.device.index for tensor in tensors if tensor.is_cuda}
    with ONE_PASS, torch.random.fork_rng(devices=devices, device_type="cuda"):
        # Not torch.manual_seed, which also seeds the GPUs that the model is not on.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        with _DrawFrom(torch.Generator().manual_seed(seed)):
            yield


class _DrawFrom(TorchDispatchMode):
    """In this thread, random operators on the CPU draw from `generator`."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        tensor = next((value for value in args if isinstance(value, Tensor)), None)
        is_on_cpu = tensor is not None and tensor.device.type == "cpu"
        if torch.Tag.nondeterministic_seeded in operator.tags and is_on_cpu:
            if any(argument.name == "generator" for argument in operator._schema.arguments):
                return operator(*args, **kwargs | {"generator": self.generator})
            # In inference mode, dropout and attention with dropout arrive whole: decompose them to
            # see what they draw.
            if operator is torch.ops.aten.dropout.default:
                return self._dropout(*args)
            with self:
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return operator(*args, **kwargs)

    def _dropout(self, inputs: Tensor, p: float, train: bool) -> Tensor:
        """Compute what torch's dropout does, with numbers of the generator."""
        if not train or p == 0:
            return inputs
        is_kept = torch.empty_like(inputs).bernoulli_(1 - p, generator=self.generator)
        return inputs * is_kept.div_(1 - p)
