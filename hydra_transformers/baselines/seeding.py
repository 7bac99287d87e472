"""Random numbers of one's own."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
from torch import nn


@contextmanager
def seeded(seed: int, model: nn.Module) -> Iterator[None]:
    """Random numbers from `seed` inside, on the CPU and the model's GPUs; outside, they go on as if nothing had been."""
    devices = {tensor.device.index for tensor in chain(model.parameters(), model.buffers()) if tensor.is_cuda}
    with torch.random.fork_rng(devices=devices, device_type="cuda"):
        # Not torch.manual_seed: it would also seed the GPUs that the model is not on.
        torch.default_generator.manual_seed(seed)
        for device in devices:
            torch.cuda.default_generators[device].manual_seed(seed)
        yield
