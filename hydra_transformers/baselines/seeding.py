"""A random generator per caller."""

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
    """Random numbers from `seed` inside, on the CPU and the model's GPUs; outside, they go on as if nothing had been.

    On the CPU they come from a generator that no other thread draws from. A GPU's fused kernels know one generator only:
    there, this package's threads wait for each other, and others should not draw meanwhile.
    """
    devices = {tensor.device.index for tensor in chain(model.parameters(), model.buffers()) if tensor.is_cuda}
    with ONE_PASS, torch.random.fork_rng(devices=devices, device_type="cuda"):
        # Not torch.manual_seed: it would also seed the GPUs that the model is not on.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        with _DrawFrom(torch.Generator().manual_seed(seed)):
            yield


class _DrawFrom(TorchDispatchMode):
    """In this thread, what is drawn on the CPU is drawn from `generator`."""

    def __init__(self, generator: torch.Generator):
        super().__init__()
        self.generator = generator

    def __torch_dispatch__(self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in operator.tags and _is_on_cpu(args):
            if any(argument.name == "generator" for argument in operator._schema.arguments):
                return operator(*args, **kwargs | {"generator": self.generator})
            # In inference mode dropout, and attention with dropout inside, come whole: taken apart, what they draw is seen.
            if operator is torch.ops.aten.dropout.default:
                return self._dropout(*args)
            with self:
                result = operator.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return operator(*args, **kwargs)

    def _dropout(self, inputs: Tensor, p: float, train: bool) -> Tensor:
        if not train or p == 0:
            return inputs
        return inputs * torch.empty_like(inputs).bernoulli_(1 - p, generator=self.generator).div_(1 - p)


def _is_on_cpu(args: tuple) -> bool:
    return next((value.device.type == "cpu" for value in args if isinstance(value, Tensor)), False)
