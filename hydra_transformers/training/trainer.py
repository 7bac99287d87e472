"""`HydraTrainer` and its arguments: learning rates for layers and classifiers, mixed images."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel, Trainer, TrainingArguments
from transformers.utils import logging

from ..data.batches import collate
from ..data.loading import PreparedData, check_class_order, load_data
from ..model_info import padding_token_of, without_adapters
from ..models.auto import is_hydra_class
from ..models.task import task_name
from .checkpoints import has_ended, last_checkpoint, load_member, trainer_state
from .losses import IGNORED_LABEL, ONE_OF_SEVERAL, EnsembleLoss, learns_from_pairs
from .mixing import check_can_mix, mix_inputs
from .parameter_groups import decayed_by_another_name, set_rates


logger = logging.get_logger(f"transformers.{__name__}")


class DivergedError(RuntimeError):
    """The loss or the weights of a training are no longer finite numbers."""


def _setting(default: Any, help_text: str) -> Any:
    return field(default=default, metadata={"help": help_text})


@dataclass
class HydraTrainingArguments(TrainingArguments):
    """`TrainingArguments` with learning rates that fall from layer to layer, and mixed images.

    A plain `Trainer` takes them, too; it trains everything at `learning_rate` and mixes nothing.
    `finetune` chooses what is best for its data: see docs/fine-tuning.md.

    Args:
        learning_rate (`float`, defaults to 1e-4):
            The peak learning rate of the last layer.
        layer_decay (`float`, defaults to 0.85):
            What multiplies the learning rate from one layer to the layer before it; the embeddings
            have the lowest. With 1 all layers have the same.
        classifier_learning_rate (`float`, *optional*, defaults to 1e-3):
            The peak learning rate of what follows the encoder, for new classifiers; `None` for
            `learning_rate`.
        mixing (`float`, defaults to 0.0):
            The share of the steps, the first ones, in which each image is mixed with another one of
            its batch, by mixup or by cutmix, and learned with the labels of both.
        class_weights (`str`, *optional*):
            "balanced" gives rare classes more weight: each class counts as if it had as many
            training rows as the others.
        per_device_train_batch_size, weight_decay, warmup_steps, lr_scheduler_type:
            As in `TrainingArguments`, with the defaults 32, 0.05, 0.1 (a share of all steps) and
            "cosine".
        dataloader_pin_memory:
            As in `TrainingArguments`; without an accelerator False, as torch would warn.
    """

    learning_rate: float = _setting(1e-4, "The peak learning rate of the last layer.")
    layer_decay: float = _setting(0.85, "What multiplies the learning rate from a layer to the one before it.")
    classifier_learning_rate: float | None = _setting(1e-3, "Of what follows the encoder; None for learning_rate.")
    mixing: float = _setting(0.0, "The share of the steps in which images are mixed.")
    class_weights: str | None = _setting(None, '"balanced" gives rare classes more weight.')
    per_device_train_batch_size: int = _setting(32, "Rows per step and device.")
    weight_decay: float = _setting(0.05, "Decoupled weight decay, not on biases and norms.")
    warmup_steps: float = _setting(0.1, "Steps of linear warm-up; below 1, a share of all steps.")
    lr_scheduler_type: str = _setting("cosine", "The schedule of the learning rates.")

    def __post_init__(self) -> None:
        super().__post_init__()
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False
        if self.class_weights not in (None, "balanced"):
            raise ValueError(f'class_weights is {self.class_weights!r}: pass "balanced" or None')
        rate = self.classifier_learning_rate
        if rate is not None and not (math.isfinite(rate) and rate >= 0):
            raise ValueError(f"classifier_learning_rate is {rate}: pass a finite number that is not negative")
        if not 0 < self.layer_decay <= 1:
            raise ValueError(
                f"layer_decay is {self.layer_decay}: pass a number above 0, and 1 for the same rate in all layers"
            )
        if not 0 <= self.mixing <= 1:
            raise ValueError(f"mixing is {self.mixing}: pass a share of the steps, from 0 to 1")


class HydraTrainer(Trainer):
    """A `Trainer` for Hydras, and for the plain models and baselines that they are compared with.

    - Learning rates fall from layer to layer, classifiers have their own, and images can be mixed:
      see `HydraTrainingArguments`. With `optimizer_cls_and_kwargs`, or an optimizer, all rates are
      the optimizer's.
    - Label smoothing, class weights and the labels of mixed images apply to each member's loss.
    - It raises a `DivergedError` when a loss, or a weight that would be saved, is not finite; a
      plain `Trainer` goes on.
    - Accumulated batches, and those of several processes, count by their labels: many models of
      Transformers ignore the number of labels that a plain `Trainer` passes, and their gradients
      are too large. Labels of regression have no ignore index.
    - Checkpoints are read by `from_pretrained`: a plain one ignores weights whose names on disk are
      older than the model's.

    Args:
        model (`PreTrainedModel` or `nn.Module`):
            A Hydra; or a plain model, a `PeftModel`, or a baseline.
        args (`TrainingArguments`, *optional*):
            Best `HydraTrainingArguments`, which are the default.
        train_dataset, eval_dataset (*optional*):
            As for `Trainer`; or a DataFrame, or a data set of raw texts, images or audio with
            `processing_class` to read them.
        processing_class (*optional*):
            The tokenizer, image processor or feature extractor; saved with the model.
        data_collator (`Callable`, *optional*):
            By default rows are stacked, and tokens padded to the longest row of their batch. CLIP
            and SigLIP are asked for the loss of pairs.
        kwargs (*optional*):
            All else that `Trainer` takes: `compute_metrics`, `callbacks`, ...

    Example:

    ```py
    hydra = AutoHydra.from_backbone("facebook/dinov2-small", num_members=3, num_labels=100)
    arguments = HydraTrainingArguments("run", num_train_epochs=9)
    data = {"train_dataset": train, "eval_dataset": validation, "processing_class": processor}
    HydraTrainer(hydra, arguments, **data).train()
    ```
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        data_collator: Callable | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        if args is None:
            args = HydraTrainingArguments("tmp_trainer")
        super().__init__(model, args, data_collator, train_dataset, eval_dataset, processing_class, **kwargs)
        if is_hydra_class(type(self._inner_model())) and not isinstance(args, HydraTrainingArguments):
            logger.warning("args are TrainingArguments: all layers and the classifiers get the same learning rate")

        # Raw rows become inputs of the model.
        self.train_dataset = prepared(train_dataset, self.model, processing_class)
        self.eval_dataset = prepared(eval_dataset, self.model, processing_class)
        if data_collator is None:
            are_pairs = learns_from_pairs(self.model)
            collate_rows = collate_pairs if are_pairs else collate
            self.data_collator = partial(collate_rows, padding=padding_token_of(self.model) or 0)

        # A loss for each member, where a plain one would not do.
        is_balanced = getattr(args, "class_weights", None) is not None
        self.mixing = getattr(args, "mixing", 0.0)
        if self.mixing:
            check_can_mix(self._inner_model(), self.compute_loss_func)
        if self.compute_loss_func is None and (args.label_smoothing_factor or is_balanced or self.mixing):
            self._set_loss(is_balanced)

    def _inner_model(self) -> nn.Module:
        """Return the model without the adapters of PEFT around it."""
        return without_adapters(self.model)

    def _set_loss(self, is_balanced: bool) -> None:
        model = self._inner_model()
        if task_name(model) not in ONE_OF_SEVERAL:
            if self.args.label_smoothing_factor or is_balanced:
                raise ValueError("label_smoothing_factor and class_weights are for models that choose one class")
            return  # several labels: those of mixed images are averaged, for the model's own loss
        self.label_smoother = None
        weights = None
        if is_balanced:
            weights = balanced_weights(self.train_dataset, model.config.num_labels)
        kind = getattr(model.config, "ensemble_loss", "members")
        self.compute_loss_func = EnsembleLoss(kind, self.args.label_smoothing_factor, weights)

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        is_ours = self.optimizer is None and self.optimizer_cls_and_kwargs is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if is_ours and isinstance(self.args, HydraTrainingArguments):
            set_rates(optimizer, self.model, self.args.layer_decay, self.args.classifier_learning_rate)
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Return the names of the parameters that have weight decay in the plain model, too."""
        decayed = super().get_decay_parameter_names(model)
        if not is_hydra_class(type(model)):
            return decayed
        return decayed + decayed_by_another_name(model)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        loss = super().training_step(model, inputs, num_items_in_batch)
        if not self._is_true_everywhere(torch.isfinite(loss).all()):
            raise DivergedError(
                f"the loss is {loss.mean().item()} in step {self.state.global_step + 1}: lower the learning rate, or "
                "look for values in the data that are not finite"
            )
        return loss

    def compute_loss(
        self, model: nn.Module, inputs: dict, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        steps_with_mixing = self.mixing * self.state.max_steps
        if self.mixing and model.training and self.state.global_step < steps_with_mixing:
            inputs = mix_inputs(inputs)
        labels = inputs.get("labels")
        is_mean = self.compute_loss_func is None and self.args.n_gpu <= 1 and self._gives_means(labels)
        if num_items_in_batch is None or not is_mean:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

        # A mean over this batch counts by the share of the labels that are in it.
        items = labels.numel() if labels.is_floating_point() else labels.ne(IGNORED_LABEL).sum()
        share = items / num_items_in_batch
        if self.args.average_tokens_across_devices:
            share = share * self.accelerator.num_processes
        if not return_outputs:
            return super().compute_loss(model, inputs) * share
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        return loss * share, outputs

    def _gives_means(self, labels: Tensor | None) -> bool:
        """Whether the model's loss without the number of labels is right: a mean over the batch."""
        if not isinstance(labels, Tensor):
            return False
        model = self._inner_model()
        if not isinstance(model, PreTrainedModel):
            return False
        return labels.is_floating_point() or not is_hydra_class(type(model))

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Any:
        counted = []
        for batch in batch_samples:
            labels = batch.get("labels")
            # Labels that are not class indices all count: -100.0 is a number like others.
            if isinstance(labels, Tensor) and labels.is_floating_point():
                batch = {**batch, "labels": torch.zeros_like(labels)}
            counted.append(batch)
        return super()._get_num_items_in_batch(counted, device)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        metrics = super().evaluate(*args, **kwargs)
        for name, value in metrics.items():
            if name.endswith("_loss") and not math.isfinite(value):
                raise DivergedError(f"{name} is {value} after step {self.state.global_step}")
        return metrics

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        finite = []
        for weight in self.model.parameters():
            if hasattr(weight, "to_local"):  # of sharded weights each process sees its own part
                weight = weight.to_local()
            finite.append(torch.isfinite(weight).all().to(self.args.device))
        if not self._is_true_everywhere(torch.stack(finite).all()):
            raise DivergedError(f"weights are not finite after step {self.state.global_step}")
        super().save_model(*args, **kwargs)

    def train_to_end(self) -> None:
        """Train, from the last whole checkpoint in `output_dir` if there is one.

        Where that is of the last step, it is loaded, and nothing is trained.
        """
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled
        checkpoint = last_checkpoint(Path(self.args.output_dir), self.args.world_size, is_sharded)
        if checkpoint is None:
            self.train()
            return
        state = trainer_state(checkpoint)
        if not has_ended(state):
            self.train(resume_from_checkpoint=os.fspath(checkpoint))
            return

        # Trainer would take one more step.
        best = None
        if self.args.load_best_model_at_end:
            best = state["best_model_checkpoint"]
        if best:
            checkpoint = checkpoint.parent / Path(best).name
        self._load_weights(os.fspath(checkpoint))

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
        loaded = load_member(self.model, folder)
        self.model.load_state_dict(loaded.state_dict())

    def _is_sharded_or_adapted(self) -> bool:
        return self.is_fsdp_enabled or self.is_deepspeed_enabled or not isinstance(self.model, PreTrainedModel)

    def _is_true_everywhere(self, condition: Tensor) -> bool:
        """Whether `condition` holds in every process, so that all of them stop together."""
        if self.args.world_size > 1:
            condition = condition.to(torch.uint8)
            dist.all_reduce(condition, op=dist.ReduceOp.MIN)
        return bool(condition)


def collate_pairs(rows: list[Mapping[str, Any]], padding: int = 0) -> dict[str, Any]:
    """Return rows of an image and a text each as one batch, which asks CLIP for its loss."""
    return collate(rows, padding) | {"return_loss": True}


def prepared(data: Any, model: nn.Module, processing_class: Any) -> Any:
    """Return data that a model can be trained on.

    A DataFrame, or with a `processing_class` raw rows, are read by `load_data`.
    """
    if isinstance(data, Mapping):
        return {name: prepared(rows, model, processing_class) for name, rows in data.items()}
    check_class_order(data, model)
    if data is None or isinstance(data, PreparedData):
        return data
    is_dataframe = hasattr(data, "iloc")
    if is_dataframe or (processing_class is not None and _are_raw_rows(data, model)):
        return load_data(data, model, processor=processing_class, labelled=True)
    return data


def _are_raw_rows(data: Any, model: nn.Module) -> bool:
    """Whether data are rows without the input that a model reads."""
    if not hasattr(data, "__len__") or not len(data):
        return False
    row = data[0]
    if not isinstance(row, Mapping):
        return False
    name = getattr(model, "main_input_name", None)
    return name is not None and name not in row


def balanced_weights(data: Any, num_labels: int) -> Tensor:
    """Return a weight for each class (classes,) by which all classes count alike.

    Over the rows, the weights have a mean of 1.
    """
    labels = getattr(data, "labels", None) or _labels_of_rows(data)
    if any(isinstance(label, str) for label in labels):
        raise ValueError("class_weights needs labels that are class indices: pass rows of load_data(data, model)")
    flat = torch.cat([torch.as_tensor(label).flatten() for label in labels])
    counted = flat[flat != IGNORED_LABEL]
    counts = counted.bincount(minlength=num_labels).double()
    weights = counts.sum() / (counts.count_nonzero() * counts)
    return torch.where(counts > 0, weights, 1.0).float()


def _labels_of_rows(data: Any) -> list[Any]:
    """Return the labels of rows, under one of the names that Transformers knows."""
    # A Dataset of torch need not end when it is iterated over.
    rows = data
    if hasattr(data, "__len__"):
        rows = (data[place] for place in range(len(data)))
    return [row.get("labels", row.get("label", row.get("label_ids"))) for row in rows]
