"""The Trainer of `finetune_members`, which stops when the loss or a weight is not finite."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer

from .callbacks import TrainingBar
from .lora import is_peft_model
from .losses import IGNORED_LABEL, TeacherLoss
from .parameter_groups import set_classifier_rate
from .run_folders import load_member


class DivergedError(RuntimeError):
    """The loss or the weights of a training are no longer finite numbers."""


class FiniteTrainer(Trainer):
    """A `Trainer` that raises a `DivergedError` when a loss, or a weight that would be saved, is not finite.

    - A plain one logs the mean of earlier losses in place of a NaN, and goes on.
    - Checkpoints are read by `from_pretrained`: a plain one ignores weights whose names on disk are older than the model's.
    - Accumulated batches, and those of several processes, count by their labels: many models of Transformers ignore the
      number of labels that a plain one passes, and their gradients are too large.

    classifier_factor: the classifier's learning rate, as a multiple of the others'
    repetitions: how often each row is in its training batch; dropout makes the copies differ
    name: the training's name, for a line after each validation and a bar (unless `disable_tqdm`); None for neither
    """

    def __init__(
        self,
        *args: Any,
        classifier_factor: float = 1.0,
        repetitions: int = 1,
        name: str | None = None,
        **kwargs: Any,
    ):
        self.classifier_factor, self.repetitions = classifier_factor, repetitions
        super().__init__(*args, **kwargs)
        if repetitions > 1 and not any(isinstance(each, nn.Dropout) and each.p for each in self.model.modules()):
            raise ValueError(
                f"repetitions is {repetitions}, and the model has no dropout, so that copies of a row teach nothing new: pass a "
                "recipe with dropout=0.1, or with repetitions=1"
            )
        # One shows a bar from the first second on, the other prints dicts.
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        if name is not None:
            self.add_callback(TrainingBar(name, enabled=not self.args.disable_tqdm))

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        is_new = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.classifier_factor != 1.0 and is_new:
            set_classifier_rate(optimizer, self.model, self.classifier_factor)
        return optimizer

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        if self.repetitions > 1:
            if "labels" not in inputs:  # CLIP would take the copies of a pair for others
                raise ValueError(
                    f"repetitions is {self.repetitions}, and the batch has no labels: pass a recipe with 1"
                )
            inputs = {name: value.repeat_interleave(self.repetitions, dim=0) for name, value in inputs.items()}
            num_items_in_batch = None if num_items_in_batch is None else self.repetitions * num_items_in_batch
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._is_true_everywhere(torch.isfinite(loss).all()):
            raise DivergedError(f"the loss is {loss.mean().item()} in step {self.state.global_step + 1}")
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if isinstance(self.compute_loss_func, TeacherLoss) and model.training:
            shown = {name: value for name, value in inputs.items() if name != "labels"}
            with self.accelerator.autocast():  # as the model's own forward
                self.compute_loss_func.target = self.compute_loss_func.teacher.probabilities(shown)
        is_mean = self.compute_loss_func is None and self._gives_means and self.args.n_gpu <= 1
        if num_items_in_batch is None or not is_mean or "labels" not in inputs:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        share = inputs["labels"].ne(IGNORED_LABEL).sum() / num_items_in_batch
        if self.args.average_tokens_across_devices:
            share = share * self.accelerator.num_processes
        found = super().compute_loss(model, inputs, return_outputs)
        return (found[0] * share, found[1]) if return_outputs else found * share

    @property
    def _gives_means(self) -> bool:
        """Whether the model's loss is a mean over the batch, as it ignores the number of labels."""
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        return isinstance(model, PreTrainedModel) and not hasattr(type(model), "backbone_rules")

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        for name, value in metrics.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise DivergedError(f"{name} is {value} after step {self.state.global_step}")
        return metrics

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        # Of sharded weights each process sees its own part.
        own = [each.to_local() if hasattr(each, "to_local") else each for each in self.model.parameters()]
        finite = [torch.isfinite(part).all().to(self.args.device) for part in own]
        if not self._is_true_everywhere(torch.stack(finite).all()):
            raise DivergedError(f"weights are not finite after step {self.state.global_step}")
        super().save_model(*args, **kwargs)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._is_sharded_or_adapted():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            self._load_weights(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._is_sharded_or_adapted():
            super()._load_best_model()
        else:
            self._load_weights(self.state.best_model_checkpoint)

    def _load_weights(self, folder: str) -> None:
        self.model.load_state_dict(load_member(self.model, folder, device="cpu").state_dict())

    def _is_sharded_or_adapted(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(self.model, PreTrainedModel)

    def _is_true_everywhere(self, condition: Tensor) -> bool:
        """Whether `condition` holds in every process, so that all of them stop together."""
        if self.args.world_size > 1:
            condition = condition.to(torch.uint8)
            dist.all_reduce(condition, op=dist.ReduceOp.MIN)
        return bool(condition)
