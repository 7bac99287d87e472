"""The paper's recipes for fine-tuning after pruning (appendices D.2 and D.3)."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import EarlyStoppingCallback, TrainerCallback

from ..data.image_changes import CropAndFlip, InTurn, RandAugment
from .callbacks import KeepZerosCallback, LogitScaleCallback, PostPruningCallback
from .parameter_groups import PARTS
from .trainer import HydraTrainingArguments


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune a member: arguments of `HydraTrainingArguments`, and what its callbacks do.

    The learning rate follows Transformers' schedules, which count steps from zero where the paper
    counts from one: the first step runs at learning rate 0, the peak comes in the step after
    `warmup_steps`, and the floor (or the zero of a linear decay) would come in the step after the
    last.

    Args:
        name (`str`):
            The name in messages.
        arguments (`dict`):
            Arguments of `HydraTrainingArguments`. Unless named here, all parts train at one
            learning rate, and checkpoints come once per epoch.
        learning_rates (`tuple[float, ...]`, *optional*):
            The peak learning rates that `finetune_members(learning_rates="grid")` chooses from on
            validation data.
        early_stopping_patience (`int`, *optional*), early_stopping_threshold (`float`):
            Evaluations without an improvement of at least the threshold before training stops.
        trainable, last_n_layers, reset_classifier, dropout, trunk_layers (*optional*):
            As in `PostPruningCallback`.
        towers (`Sequence[str]`, *optional*):
            As in `PostPruningCallback`, for CLIP and SigLIP.
        max_logit_scale (`float`, *optional*):
            The largest factor of CLIP's cosines, as in `LogitScaleCallback`.
        keep_zeros (`bool`, defaults to `False`):
            Keep weights at zero that are zero at the start, as after `oba_prune`.
        image_change (`Callable`, *optional*):
            Changes every training image before the processor reads it, such as `CropAndFlip()`.
            `finetune_members` applies it to images that `load_data` read; with a Trainer of your
            own, pass `dataclasses.replace(data, change=...)`.
    """

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    learning_rates: tuple[float, ...] = ()
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    trainable: tuple[str, ...] = ("attention", "mlp", "layernorm", "classifier")
    last_n_layers: int | None = None
    reset_classifier: bool = False
    dropout: float | None = None
    trunk_layers: int | float = 0
    keep_zeros: bool = False
    towers: tuple[str, ...] | None = None
    max_logit_scale: float | None = None
    image_change: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.keep_zeros and self.reset_classifier:
            raise ValueError(
                "keep_zeros would keep the zeros of reset_classifier, and the classifier would never train: "
                "pass one of them"
            )

    def with_arguments(self, **arguments: Any) -> "Recipe":
        """Return the recipe with other training arguments.

        >>> recipe("sst2").with_arguments(num_train_epochs=2).arguments["num_train_epochs"]
        2
        """
        return replace(self, arguments={**self.arguments, **arguments})

    def training_arguments(self, output_dir: str | os.PathLike, **overrides: Any) -> HydraTrainingArguments:
        """Return the recipe as `HydraTrainingArguments`, for `HydraTrainer` or `Trainer`.

        The paper names no batch sizes for classifiers: pass `per_device_train_batch_size`, it is 32
        otherwise. To validate during the training, pass `eval_strategy="epoch"`. A recipe that
        stops early or keeps the best checkpoint ("sst2") always does: its Trainer needs an
        `eval_dataset`, and a `compute_metrics` that returns its metric, such as `compute_accuracy`.

        Args:
            output_dir (`str` or `os.PathLike`):
                The folder of the checkpoints.
            overrides:
                Arguments of `HydraTrainingArguments`, which win over the recipe's. With
                `num_train_epochs` in place of its steps, the warm-up is the recipe's share of them.
        """
        arguments = {
            "layer_decay": 1.0,
            "classifier_learning_rate": None,
            "save_strategy": "epoch",
            "save_total_limit": 2,
            # Early stopping goes on counting where it was when a run resumes.
            "restore_callback_states_from_checkpoint": self.early_stopping_patience is not None,
            **self.arguments,
            **overrides,
        }
        decides_by_validation = self.early_stopping_patience is not None or arguments.get("load_best_model_at_end")
        arguments.setdefault("eval_strategy", "epoch" if decides_by_validation else "no")
        if "num_train_epochs" in overrides and "max_steps" not in overrides:
            # Otherwise the recipe's steps would win over the epochs, and all might be warm-up.
            steps = arguments.get("max_steps", -1)
            arguments["max_steps"] = -1
            if steps > 0 and "warmup_steps" not in overrides:
                arguments["warmup_steps"] = arguments.get("warmup_steps", 0) / steps
        if 0 < arguments.get("max_steps", -1) <= arguments.get("warmup_steps", 0):
            raise ValueError(
                f"max_steps is {arguments['max_steps']} and warmup_steps is {arguments['warmup_steps']}: training "
                "would end in its warm-up, pass a smaller warmup_steps too"
            )
        return HydraTrainingArguments(output_dir=os.fspath(output_dir), **arguments)

    def callbacks(self) -> list[TrainerCallback]:
        """Return new callbacks for one Trainer.

        They freeze, stop early, keep zeros, and bound the logit scale.
        """
        names = ("trainable", "last_n_layers", "reset_classifier", "dropout", "trunk_layers", "towers")
        callbacks: list[TrainerCallback] = [PostPruningCallback(**{name: getattr(self, name) for name in names})]
        if self.early_stopping_patience is not None:
            callbacks.append(EarlyStoppingCallback(self.early_stopping_patience, self.early_stopping_threshold))
        if self.keep_zeros:
            callbacks.append(KeepZerosCallback())
        if self.max_logit_scale is not None:
            callbacks.append(LogitScaleCallback(self.max_logit_scale))
        return callbacks


IMAGENET1K = Recipe(
    name="imagenet1k",
    arguments={
        "optim": "sgd",
        "optim_args": "momentum=0.9",
        "learning_rate": 0.01,
        "weight_decay": 0.0,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr_rate": 1e-5},
        "warmup_steps": 5_000,
        "max_steps": 120_000,
        "label_smoothing_factor": 0.1,
    },
    learning_rates=(0.003, 0.01, 0.03, 0.06),
    dropout=0.1,
    image_change=InTurn((CropAndFlip(least_share=0.08), RandAugment(operations=2, magnitude=12))),
)

CIFAR100 = replace(
    IMAGENET1K.with_arguments(warmup_steps=500, max_steps=10_000),
    name="cifar100",
    learning_rates=(0.001, 0.003, 0.01, 0.03),
    dropout=None,
    last_n_layers=5,
    reset_classifier=True,
    image_change=CropAndFlip(least_share=0.08),
)

SST2 = Recipe(
    name="sst2",
    arguments={
        "optim": "adamw_torch",
        "learning_rate": 1e-5,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "lr_scheduler_type": "linear",
        "warmup_steps": 0.1,
        "num_train_epochs": 7,
        "load_best_model_at_end": True,
        "metric_for_best_model": "accuracy",
        "greater_is_better": True,
    },
    early_stopping_patience=2,
    early_stopping_threshold=5e-4,
)

CLIP = Recipe(
    name="clip-lit",
    arguments={
        "optim": "adamw_torch",
        "learning_rate": 5e-5,
        "weight_decay": 0.2,
        "adam_beta2": 0.98,
        "adam_epsilon": 1e-6,
        "max_grad_norm": 0.0,
        "lr_scheduler_type": "cosine",
        "warmup_steps": 100,
        "num_train_epochs": 1,
        "per_device_train_batch_size": 1_500,
        "per_device_eval_batch_size": 1_500,
    },
    learning_rates=(1e-4, 5e-5, 1e-5),
    trainable=PARTS,
    towers=("text",),
    max_logit_scale=100.0,
)

RECIPES = {recipe.name: recipe for recipe in (IMAGENET1K, CIFAR100, SST2, CLIP)}
"""All recipes, by name."""


def recipe(name: str) -> Recipe:
    """Return the paper's recipe for fine-tuning after pruning.

    Args:
        name (`str`): "imagenet1k", "cifar100", "sst2" or "clip-lit".

    They are from appendices D.2 and D.3, with these points settled:

    - The paper does not say which learning rate of a grid won. `learning_rate` is then 0.01, which
      is in both grids; `finetune_members(learning_rates="grid")` chooses one of the grid on
      validation data, as the paper does.
    - "imagenet1k" and "cifar100" have no weight decay (C.1.2, C.1.3) and no gradient clipping,
      which D.2 does not mention; Trainer's default would clip at 1. They end with the last step's
      weights.
    - "cifar100": D.2 says under (1) that the last five blocks train, and further on that "only the
      final classification layer" does. We take (1): the last five blocks, the LayerNorm behind them
      and the classifier, which starts from zeros. For the other reading,
      `dataclasses.replace(recipe("cifar100"), trainable=("classifier",))`.
    - "sst2": D.2 gives neither the decay, nor the epochs, nor when to stop. They are those of the
      backbone's own fine-tuning (C.2): weight decay 0.01, up to 7 epochs, early stopping on
      validation accuracy (patience 2, delta 5e-4), and the epoch with the best validation accuracy
      is kept. The first 3,000 training examples are the validation set, and texts have 128 tokens.
      BERT's dropout stays.
    - "clip-lit" locks the images' tower and its projection (LiT), and trains the text tower, its
      embeddings too, and the logit scale, for one epoch over pairs of images and texts. What D.3
      takes from OpenCLIP are its defaults: betas of 0.9 and 0.98, an epsilon of 1e-6, weight decay
      0.2, a cosine to zero, no clipping, a logit scale of at most 100. The paper chooses the rate
      of a grid by the training loss; `learning_rates="grid"` does so by the validation loss. Its
      batch has 1,500 pairs on each GPU, and four of them are accumulated. There each image is
      compared with the texts of the whole batch, on all GPUs; here with those of its own step and
      process.
    - Training images are cropped and flipped, for "imagenet1k" also changed by RandAugment (2
      operations, magnitude 12), where `finetune_members` gets images that `load_data` read
      (`Recipe.image_change`). D.2 does not say how much of an image a crop keeps; we take
      torchvision's default, at least 8 % of its area. Its crop is resized before RandAugment, ours
      behind it, by the processor, which also normalises as the model's own does.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}: choose from {', '.join(RECIPES)}, or make a Recipe")
    return RECIPES[name]
