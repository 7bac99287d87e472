"""The gradients of a batch. On a GPU the work is recorded once for each shape, as a CUDA graph, and replayed: a small model
otherwise waits for Python most of the time."""

import torch
from torch import nn

from .rows import Batch


LARGEST_NORM = 1.0
PASSES_BEFORE_RECORDING = 2  # in which libraries set themselves up


class Gradients:
    """Computes the gradients of `factor` times a model's loss, clipped. They stay in the same memory from batch to batch."""

    def __init__(self, model: nn.Module, factor: float, device: str):
        self.model = model
        self.factor = factor
        self.device = device
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.graphs: dict[tuple, tuple[torch.cuda.CUDAGraph, Batch]] = {}

    def __call__(self, batch: Batch) -> None:
        if self.device != "cuda":
            return self.compute(batch)
        shapes = tuple((name, *tensor.shape) for name, tensor in batch.items())
        if shapes not in self.graphs:
            self.graphs[shapes] = self.record({name: tensor.clone() for name, tensor in batch.items()})
        graph, inputs = self.graphs[shapes]
        for name, tensor in batch.items():
            inputs[name].copy_(tensor)
        return graph.replay()

    def compute(self, batch: Batch) -> None:
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if gradients:
            torch._foreach_zero_(gradients)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            loss = self.model(**batch).loss * self.factor
        loss.backward()
        nn.utils.clip_grad_norm_(self.parameters, LARGEST_NORM)

    def record(self, inputs: Batch) -> tuple[torch.cuda.CUDAGraph, Batch]:
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(PASSES_BEFORE_RECORDING):
                self.compute(inputs)
        pools = [recorded.pool() for recorded, _ in self.graphs.values()]
        with torch.cuda.graph(graph, pool=pools[0] if pools else None, stream=stream):
            self.compute(inputs)
        return graph, inputs
