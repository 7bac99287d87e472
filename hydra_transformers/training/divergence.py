"""Training that ends where its numbers do."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Trainer

from .parameter_groups import classifier_parameters


class DivergedError(RuntimeError):
    """The loss or the weights of a training are no longer finite numbers."""


class FiniteTrainer(Trainer):
    """A `Trainer` that raises a `DivergedError` where the loss, in training or validation, or a weight that would be
    saved is not a finite number. (A plain one goes on: it logs the mean of earlier losses in place of a NaN.)

    classifier_factor: how many times the learning rate the classifier trains with
    """

    def __init__(self, *args, classifier_factor: float = 1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.classifier_factor = classifier_factor
        if classifier_factor != 1 and (self.args.fsdp or self.args.deepspeed):
            raise ValueError(
                f"classifier_factor is {classifier_factor}: under FSDP and DeepSpeed, which split parameters up, the "
                "classifier cannot have a learning rate of its own, pass 1"
            )

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_new and self.classifier_factor != 1:
            faster = {id(parameter) for parameter in classifier_parameters(self.model)}
            for group in list(optimizer.param_groups):
                own = [parameter for parameter in group["params"] if id(parameter) in faster]
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in faster]
                if own:
                    optimizer.add_param_group({**group, "params": own, "lr": self.classifier_factor * group["lr"]})
        return optimizer

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
