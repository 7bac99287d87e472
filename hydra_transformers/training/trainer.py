"""The Trainer of `finetune_members`: it stops where the loss or a weight is no finite number."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel, PrinterCallback, ProgressCallback, Trainer

from .callbacks import TrainingBar
from .lora import is_peft_model
from .losses import IGNORED_LABEL
from .parameter_groups import set_classifier_rate


class DivergedError(RuntimeError):
    """The loss or the weights of a training are no longer finite numbers."""


class FiniteTrainer(Trainer):
    """A `Trainer` that raises a `DivergedError` where the loss, in training or validation, or a weight that would be
    saved is not a finite number. (A plain one goes on: it logs the mean of earlier losses in place of a NaN.)

    A checkpoint is read as `from_pretrained` reads it. (A plain one takes the names on disk for those of the model, which for
    some models are older ones, and goes on with the weights it has.)

    Batches that are accumulated, and those of several processes, count by their labels with plain models of Transformers too.
    (Of a plain one, many models are asked to divide by the labels of all of them and do not, so that gradients are as many
    times too large.)

    classifier_factor: how many times the learning rate of the rest what follows the encoder has
    name: what is trained, for a line after each validation and a bar, which `disable_tqdm` leaves out; None for neither
    """

    def __init__(self, *args, classifier_factor: float = 1.0, name: str | None = None, **kwargs):
        self.classifier_factor = classifier_factor
        super().__init__(*args, **kwargs)
        # Of Transformers' own, one has a bar from the first second on and the other prints dicts.
        for callback in (PrinterCallback, ProgressCallback):
            self.remove_callback(callback)
        if name is not None:
            self.add_callback(TrainingBar(name, enabled=not self.args.disable_tqdm))

    def create_optimizer(self, *args, **kwargs) -> torch.optim.Optimizer:
        is_there = self.optimizer is not None
        optimizer = super().create_optimizer(*args, **kwargs)
        if self.classifier_factor != 1.0 and not is_there:
            set_classifier_rate(optimizer, self.model, self.classifier_factor)
        return optimizer

    def training_step(self, *args, **kwargs) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if not self._is_true_everywhere(torch.isfinite(loss).all()):
            raise DivergedError(f"the loss is {loss.mean().item()} in step {self.state.global_step + 1}")
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
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
        """Whether the model's loss is the mean of a batch, unless it is told the number of labels."""
        model = self.model.get_base_model() if is_peft_model(self.model) else self.model
        return isinstance(model, PreTrainedModel) and not hasattr(type(model), "backbone_rules")

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

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if self._is_sharded_or_adapted():
            super()._load_from_checkpoint(resume_from_checkpoint, model)
        else:
            load_weights(self.model, resume_from_checkpoint)

    def _load_best_model(self) -> None:
        if self._is_sharded_or_adapted():
            super()._load_best_model()
        else:
            load_weights(self.model, self.state.best_model_checkpoint)

    def _is_sharded_or_adapted(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(self.model, PreTrainedModel)

    def _is_true_everywhere(self, condition: Tensor) -> bool:
        """In every process, so that all of them stop."""
        if self.args.world_size > 1:
            condition = condition.to(torch.uint8)
            dist.all_reduce(condition, op=dist.ReduceOp.MIN)
        return bool(condition)


def load_weights(model: PreTrainedModel, folder: str | os.PathLike) -> None:
    """Gives `model` the weights that were saved in `folder`; refuses a folder that lacks some of them."""
    with broken_weights_named(folder):
        loaded, found = type(model).from_pretrained(folder, dtype=model.dtype, output_loading_info=True)
    check_nothing_is_missing(folder, set(found["missing_keys"]))
    model.load_state_dict(loaded.state_dict())


@contextmanager
def broken_weights_named(folder: str | os.PathLike) -> Iterator[None]:
    """Says where a file of weights lies that cannot be read."""
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"the weights in {folder} are broken ({error}): remove that folder and train again"
        ) from error


def check_nothing_is_missing(folder: str | os.PathLike, names: set[str]) -> None:
    """What a file lacks would stay as it was, or be drawn at random."""
    if names:
        raise ValueError(f"{folder} has no weights for {min(names)}: remove that folder and train again")
