"""Recipes for fine-tuning: the paper's after pruning (appendix D.2), and ours."""

import math
import os
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from transformers import EarlyStoppingCallback, PreTrainedConfig, TrainerCallback, TrainingArguments

from ..fusion import check_trunk_layers
from ..models.auto import AUTO_CLASSES, CLASSIFIERS, auto_class_of
from .callbacks import KeepZerosCallback, PostPruningCallback
from .losses import EnsembleLoss
from .parameter_groups import PARTS


ROWS_TRIED = 50_000  # about as many as the epochs of the recipes were tried with
MOST_EPOCHS = 30
LEAST_PATIENCE = 3
NOT_NEGATIVE = ("momentum", "weight_decay", "max_grad_norm", "warmup_steps", "floor", "early_stopping_threshold")


def check_learning_rate(name: str, rate: float) -> float:
    """A learning rate as a finite float, not negative."""
    if not (math.isfinite(float(rate)) and float(rate) >= 0):
        raise ValueError(f"{name} has {rate}: a learning rate is a finite number, and not negative")
    return float(rate)


def _setting(help_text: str, **default: Any) -> Any:
    return field(metadata={"help": help_text}, **default)


@dataclass(frozen=True)
class Recipe:
    """How to fine-tune a member; `describe()` explains every field.

    Take one with `recipe(name)`, write your own, `Recipe(...)`, or change one:
    `dataclasses.replace(recipe("cifar100"), max_steps=2_000, warmup_steps=100)`.

    The learning rate follows Transformers' schedules, which count steps from zero where the paper counts from one: the first
    step runs at learning rate 0, the peak comes in step `warmup_steps + 1`, and the floor (or the zero of a linear decay) would
    come in the step after the last.
    """

    name: str = _setting("the name in messages")
    optimizer: str = _setting('"sgd" or "adamw"')
    learning_rate: float = _setting("the peak learning rate, unless one is chosen by validation")
    learning_rate_grid: tuple[float, ...] = _setting("peak learning rates to choose from by validation", default=())
    classifier_learning_rate: float | None = _setting(
        "the peak for what follows the encoder, scaled with `learning_rate` where another is chosen; None for the same",
        default=None,
    )
    momentum: float = _setting("momentum of SGD", default=0.0)
    weight_decay: float = _setting("decoupled weight decay, never on biases and LayerNorms", default=0.0)
    max_grad_norm: float = _setting("the L2 norm gradients are clipped to; 0 for no clipping", default=0.0)
    schedule: str = _setting('"cosine" or "linear" decay after the warm-up', default="cosine")
    warmup_steps: float = _setting("steps of linear warm-up; below 1, a share of all steps", default=0)
    floor: float = _setting("the end of the cosine decay, as a fraction of the peak", default=0.0)
    max_steps: int | None = _setting("optimizer steps in all; None if epochs are given", default=None)
    epochs: float | None = _setting("passes over the training set; None if steps are given", default=None)
    early_stopping_patience: int | None = _setting(
        "evaluations without improvement before training stops; None to never stop early", default=None
    )
    early_stopping_threshold: float = _setting("the smallest improvement that counts", default=0.0)
    keep_best: bool = _setting("return to the checkpoint with the best validation at the end", default=False)
    metric: str = _setting('the validation metric: "accuracy", "loss" or one of yours', default="accuracy")
    label_smoothing: float = _setting("share of the target spread over all classes", default=0.0)
    dropout: float | None = _setting("dropout inside each layer; None for the config's", default=None)
    trainable: tuple[str, ...] = _setting(
        "the parts that train", default=("attention", "mlp", "layernorm", "classifier")
    )
    last_n_layers: int | None = _setting("train the last n layers only; None for all", default=None)
    trunk_layers: int | float = _setting(
        "leading layers, or the share of them, that do not train, nor anything before them: fused members run them once",
        default=0,
    )
    reset_classifier: bool = _setting("start from a classifier of zeros", default=False)
    repetitions: int = _setting(
        "how often `finetune_members` has each row in its batch, with other dropout each time: as many times the work",
        default=1,
    )
    keep_zeros: bool = _setting("keep weights at zero that are zero at the start, as after `oba_prune`", default=False)
    train_transforms: tuple[tuple[str, dict], ...] = _setting(
        "(name, arguments) of the transforms of training inputs, for images named as in torchvision; without a size, the "
        "model's counts",
        default=(),
    )

    def __post_init__(self) -> None:
        for name, known in {"optimizer": ("sgd", "adamw"), "schedule": ("cosine", "linear")}.items():
            if getattr(self, name) not in known:
                raise ValueError(f'{name} is {getattr(self, name)!r}: pass "{known[0]}" or "{known[1]}"')
        if (self.max_steps is None) == (self.epochs is None):
            raise ValueError(f"max_steps is {self.max_steps} and epochs is {self.epochs}: pass one of them")
        check_learning_rate("learning_rate", self.learning_rate)
        for rate in self.learning_rate_grid:
            check_learning_rate("learning_rate_grid", rate)
        if self.classifier_learning_rate is not None:
            check_learning_rate("classifier_learning_rate", self.classifier_learning_rate)
            if self.learning_rate == 0:
                raise ValueError("classifier_learning_rate is in proportion to learning_rate: pass one above 0")
        if self.keep_zeros and self.reset_classifier:
            raise ValueError(
                "keep_zeros would keep the zeros that reset_classifier starts from, and the classifier would never train: pass "
                "one of them"
            )
        if isinstance(self.repetitions, bool) or not isinstance(self.repetitions, int) or self.repetitions < 1:
            raise ValueError(f"repetitions is {self.repetitions!r}: pass a whole number, 1 or more")
        check_trunk_layers(self.trunk_layers)
        if self.trunk_layers < 0:
            raise ValueError(f"trunk_layers is {self.trunk_layers}: pass a number of layers, 0 or more")
        for name in NOT_NEGATIVE:
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"{name} is {value}: pass a finite number that is not negative")

    @property
    def classifier_factor(self) -> float:
        """The learning rate of what follows the encoder, as a multiple of the others'."""
        rate = self.classifier_learning_rate
        return 1.0 if rate is None else rate / self.learning_rate

    @property
    def greater_is_better(self) -> bool:
        return not self.metric.endswith("loss")

    def training_arguments(self, output_dir: str | os.PathLike, **overrides: Any) -> TrainingArguments:
        """The recipe as `TrainingArguments`; `overrides` are arguments of that class and win.

        The paper names no batch sizes: pass `per_device_train_batch_size`, it is 8 otherwise. Validation and
        checkpoints come once per epoch. A recipe that stops early or keeps the best checkpoint ("sst2") needs a
        `compute_metrics` in the Trainer that returns its metric, such as `compute_accuracy`.
        """
        stops_early = self.early_stopping_patience is not None
        arguments = {
            "learning_rate": self.learning_rate,
            "weight_decay": self.weight_decay,
            "max_grad_norm": self.max_grad_norm,
            "warmup_steps": self.warmup_steps,
            "label_smoothing_factor": self.label_smoothing,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_total_limit": 2,
            "load_best_model_at_end": self.keep_best,
            "max_steps": -1 if self.max_steps is None else self.max_steps,
            "optim": {"adamw": "adamw_torch", "sgd": "sgd"}[self.optimizer],
            "lr_scheduler_type": {"linear": "linear", "cosine": "cosine_with_min_lr"}[self.schedule],
        }
        if self.epochs is not None:
            arguments["num_train_epochs"] = self.epochs
        if self.keep_best or stops_early:
            arguments |= {"metric_for_best_model": self.metric, "greater_is_better": self.greater_is_better}
            # Early stopping goes on counting where it was when a run resumes.
            arguments["restore_callback_states_from_checkpoint"] = stops_early
        if self.optimizer == "sgd":
            arguments["optim_args"] = f"momentum={self.momentum}"
        if self.schedule == "cosine":
            arguments["lr_scheduler_kwargs"] = {"min_lr_rate": self.floor}
        arguments |= overrides
        if "num_train_epochs" in overrides and "max_steps" not in overrides:
            arguments["max_steps"] = -1  # otherwise the recipe's steps would silently win over the epochs
        if 0 < arguments["max_steps"] <= arguments["warmup_steps"]:
            raise ValueError(
                f"max_steps is {arguments['max_steps']} and warmup_steps is {arguments['warmup_steps']}: training "
                "would end in its warm-up, pass a smaller warmup_steps too"
            )
        return TrainingArguments(output_dir=os.fspath(output_dir), **arguments)

    def callbacks(self) -> list[TrainerCallback]:
        """New callbacks for one `Trainer`: freezing, and what the recipe adds: early stopping, zeros that stay."""
        names = ("trainable", "last_n_layers", "reset_classifier", "dropout", "classifier_factor", "trunk_layers")
        callbacks: list[TrainerCallback] = [PostPruningCallback(**{name: getattr(self, name) for name in names})]
        if self.early_stopping_patience is not None:
            callbacks.append(EarlyStoppingCallback(self.early_stopping_patience, self.early_stopping_threshold))
        if self.keep_zeros:
            callbacks.append(KeepZerosCallback())
        return callbacks

    @property
    def identity(self) -> dict[str, Any]:
        """Its settings, by which a run is recognised; `repetitions` only where rows are repeated, as older runs do not name it."""
        return {name: value for name, value in asdict(self).items() if name != "repetitions" or value > 1}

    def loss(self, kind: str = "members") -> EnsembleLoss:
        """The recipe's loss for `Trainer(compute_loss_func=...)`, which a fused Hydra needs for label smoothing."""
        return EnsembleLoss(kind, self.label_smoothing)

    def summary(self, arguments: TrainingArguments) -> str:
        """The training in one line, without its learning rate.

        arguments: those it trains with, which may override the recipe
        """
        warmup, steps, epochs = arguments.warmup_steps, arguments.max_steps, arguments.num_train_epochs
        count, unit = (steps, "step") if steps > 0 else (epochs, "epoch")
        length = f"{count:,g} {unit}{'' if count == 1 else 's'}"
        if self.early_stopping_patience is not None:
            metric = f"{'better' if self.greater_is_better else 'lower'} validation {self.metric}"
            length = f"at most {length}, or until {self.early_stopping_patience} validations in turn bring no {metric}"
        parts = [
            {"adamw": "AdamW", "sgd": "SGD"}[self.optimizer],
            f"{warmup:.0%} warm-up" if warmup < 1 else f"{warmup:,.0f} steps of warm-up",
            f"{self.schedule} decay",
            length,
            *([f"each row {self.repetitions} times in a batch"] if self.repetitions > 1 else []),
        ]
        return ", ".join([*parts, "the best is kept"] if self.keep_best else parts)

    def describe(self) -> str:
        """One line per field: its value and its meaning."""
        lines = [f"{item.name} = {getattr(self, item.name)!r}  # {item.metadata['help']}" for item in fields(self)]
        return "\n".join(lines)


IMAGENET_NORMALIZATION = ("Normalize", {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)})
CROP_AND_FLIP = (("RandomResizedCrop", {"size": 224}), ("RandomHorizontalFlip", {"p": 0.5}))

IMAGENET1K = Recipe(
    name="imagenet1k",
    optimizer="sgd",
    momentum=0.9,
    learning_rate=0.01,
    learning_rate_grid=(0.003, 0.01, 0.03, 0.06),
    warmup_steps=5_000,
    max_steps=120_000,
    floor=1e-5,
    label_smoothing=0.1,
    dropout=0.1,
    train_transforms=(
        *CROP_AND_FLIP,
        ("RandAugment", {"num_ops": 2, "magnitude": 12}),
        IMAGENET_NORMALIZATION,
    ),
)

CIFAR100 = replace(
    IMAGENET1K,
    name="cifar100",
    learning_rate_grid=(0.001, 0.003, 0.01, 0.03),
    warmup_steps=500,
    max_steps=10_000,
    dropout=None,
    last_n_layers=5,
    reset_classifier=True,
    train_transforms=(*CROP_AND_FLIP, IMAGENET_NORMALIZATION),
)

TOKENIZE = ("tokenize", {"max_length": 128, "truncation": True, "padding": "max_length"})

SST2 = Recipe(
    name="sst2",
    optimizer="adamw",
    learning_rate=1e-5,
    weight_decay=0.01,
    max_grad_norm=1.0,
    schedule="linear",
    warmup_steps=0.1,
    epochs=7,
    early_stopping_patience=2,
    early_stopping_threshold=5e-4,
    keep_best=True,
    train_transforms=(TOKENIZE,),
)

FINETUNE_IMAGES = Recipe(
    name="finetune-images",
    optimizer="adamw",
    learning_rate=1e-4,
    classifier_learning_rate=1e-3,
    weight_decay=0.05,
    max_grad_norm=1.0,
    warmup_steps=0.1,
    epochs=8,
    trainable=PARTS,
    train_transforms=(("RandomResizedCrop", {"scale": (0.7, 1.0)}), ("RandomHorizontalFlip", {"p": 0.5})),
)
TUNE_IMAGES = replace(FINETUNE_IMAGES, name="tune-images", learning_rate=5e-5, classifier_learning_rate=5e-4, epochs=3)

FINETUNE_TEXTS = replace(
    FINETUNE_IMAGES,
    name="finetune-texts",
    learning_rate=5e-5,
    classifier_learning_rate=5e-4,
    weight_decay=0.01,
    schedule="linear",
    epochs=2,
    train_transforms=(TOKENIZE,),
)
TUNE_TEXTS = replace(FINETUNE_TEXTS, name="tune-texts", learning_rate=3e-5, classifier_learning_rate=3e-4, epochs=1)

REPEAT_TEXTS = replace(FINETUNE_TEXTS, name="finetune-texts-repeated", repetitions=4)

RECIPES = {
    each.name: each
    for each in (IMAGENET1K, CIFAR100, SST2, FINETUNE_IMAGES, FINETUNE_TEXTS, REPEAT_TEXTS, TUNE_IMAGES, TUNE_TEXTS)
}
"""All recipes, by name."""


def recipe(name: str) -> Recipe:
    """A recipe by name: the paper's for "imagenet1k", "cifar100" and "sst2", and ours for any task.

    "finetune-images" and "finetune-texts" are for pre-trained models with a new classifier, "tune-images" and "tune-texts" for
    fine-tuned models that were pruned. Everything trains, the classifier at ten times the learning rate of the rest, which
    needs `finetune_members` (a plain `Trainer` is stopped). They were tried with batches of 256 images of 112 pixels and of
    128 texts. "finetune-texts-repeated" has each text four times in its batch, with other dropout each time: four times the
    work, for a little more accuracy and detection (docs/results/sst2-gte.md).

    The paper's are from appendix D.2, with these points settled:

    - The paper does not say which learning rate of a grid won. `learning_rate` is then 0.01, which is in both grids;
      `finetune_members(..., learning_rates="grid")` chooses as the paper does.
    - "imagenet1k" and "cifar100" have no weight decay (C.1.2, C.1.3) and no gradient clipping, which D.2 does not
      mention; Trainer's default would clip at 1. They end with the last step's weights.
    - "cifar100": D.2 says under (1) that the last five blocks train, and further on that "only the final
      classification layer" does. We take (1): the last five blocks, the LayerNorm behind them and the classifier,
      which starts from zeros. For the other reading, `dataclasses.replace(recipe("cifar100"), trainable=("classifier",))`.
    - "sst2": D.2 gives neither the decay, nor the epochs, nor when to stop. They are those of the backbone's own
      fine-tuning (C.2): weight decay 0.01, up to 7 epochs, early stopping on validation accuracy (patience 2, delta
      5e-4), and the epoch with the best validation accuracy is kept. The first 3,000 training examples are the
      validation set. BERT's dropout stays.
    """
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}: choose from {', '.join(RECIPES)}, or make a Recipe")
    return RECIPES[name]


def epochs_for(rows: int, epochs_tried: float) -> int:
    """Passes over a training set of `rows` rows, where `epochs_tried` are right for 50,000.

    The steps grow with the square root of the rows: small sets are seen more often, large ones less, 1 to 30 times.

        >>> [epochs_for(rows, epochs_tried=8) for rows in (500, 5_000, 50_000, 500_000, 5_000_000)]
        [30, 25, 8, 3, 1]
    """
    if rows < 1:
        raise ValueError(f"rows is {rows}: pass at least 1")
    return min(MOST_EPOCHS, max(1, round(epochs_tried * math.sqrt(ROWS_TRIED / rows))))


def default_recipe(
    config: PreTrainedConfig, train_data: Any, is_pretrained: bool = False, epochs: int | None = None
) -> Recipe:
    """The recipe where none is named: "finetune-images" and so on, with epochs by the data's size (`epochs_for`). It ends early
    when validation accuracy has not risen for a third of them (at least 3), and keeps the weights that validated best.

    Args:
        config: of the model, which reads images or texts. Sounds train as images do, without transforms; that was not tried.
        train_data: only its number of rows counts.
        is_pretrained: whether it is a pre-trained model with a new classifier, rather than a pruned member.
        epochs: this many instead, if given.
    """
    named = RECIPES[base_recipe(config, is_pretrained)]
    if epochs is None:
        if not hasattr(train_data, "__len__"):
            raise ValueError(
                f"train_data is a {type(train_data).__name__} of unknown length, by which epochs are chosen: pass a recipe"
            )
        epochs = epochs_for(len(train_data), named.epochs)
    patience = max(LEAST_PATIENCE, math.ceil(epochs / 3))
    return replace(
        named,
        name=f"default {named.name}",
        train_transforms=() if "Audio" in trained_auto_class(config, is_pretrained) else named.train_transforms,
        epochs=epochs,
        early_stopping_patience=patience if patience < epochs else None,
        keep_best=True,
    )


def base_recipe(config: PreTrainedConfig, is_pretrained: bool) -> str:
    """The name of the recipe that the default one starts from."""
    auto_class = trained_auto_class(config, is_pretrained)
    if "ZeroShot" in auto_class:
        raise ValueError(f"a {config.model_type} has no classifier to train, and no default recipe: pass a recipe")
    reads = "texts" if any(kind in auto_class for kind in ("Sequence", "Token")) else "images"
    return f"{'finetune' if is_pretrained else 'tune'}-{reads}"


def trained_auto_class(config: PreTrainedConfig, is_pretrained: bool) -> str:
    """The name of the Auto class that is trained: a pre-trained model is given a classifier."""
    is_given_a_classifier = is_pretrained and config.model_type in CLASSIFIERS
    return AUTO_CLASSES[CLASSIFIERS[config.model_type]] if is_given_a_classifier else auto_class_of(config)


def recipe_for(
    given: Recipe | str | None,
    config: PreTrainedConfig,
    train_data: Any,
    is_pretrained: bool = False,
    epochs: int | None = None,
    max_steps: int | None = None,
) -> Recipe:
    """The recipe that is given, by itself or by name, or the default one, for this many epochs or steps if they are given: the
    warm-up then keeps its share. Arguments of `default_recipe`."""
    if given is None:
        found = default_recipe(config, train_data, is_pretrained, epochs)
        return found if max_steps is None else replace(found, max_steps=max_steps, epochs=None)
    found = recipe(given) if isinstance(given, str) else given
    if epochs is None and max_steps is None:
        return found
    warmup = found.warmup_steps if found.warmup_steps < 1 else found.warmup_steps / found.max_steps
    return replace(found, max_steps=max_steps, epochs=epochs, warmup_steps=warmup)
