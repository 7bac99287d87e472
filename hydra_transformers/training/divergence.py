"""Training that ends where its numbers do."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer


class DivergedError(RuntimeError):
    """The loss or the weights of a training are no longer finite numbers."""


class FiniteTrainer(Trainer):
    """A `Trainer` that raises a `DivergedError` where the loss, in training or validation, or a weight that would be
    saved is not a finite number. (A plain one goes on: it logs the mean of earlier losses in place of a NaN.)"""

    def training_step(self, *args, **kwargs) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if not self._is_true_everywhere(torch.isfinite(loss).all()):
            raise DivergedError(f"the loss is {loss.mean().item()} in step {self.state.global_step + 1}")
        return loss

    def evaluate(self, *args, **kwargs) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        for name, value in metrics.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise DivergedError(f"{name} is {value} after step {self.state.global_step}")
        return metrics

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        finite = [torch.isfinite(parameter).all().to(self.args.device) for parameter in self.model.parameters()]
        if not self._is_true_everywhere(torch.stack(finite).all()):
            raise DivergedError(f"weights are not finite after step {self.state.global_step}")
        super().save_model(*args, **kwargs)

    def _is_true_everywhere(self, condition: Tensor) -> bool:
        """In every process, so that all of them stop."""
        if self.args.world_size > 1:
            condition = condition.to(torch.uint8)
            dist.all_reduce(condition, op=dist.ReduceOp.MIN)
        return bool(condition)
