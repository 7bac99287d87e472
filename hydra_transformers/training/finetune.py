"""`finetune`: a pre-trained model and data in, a fine-tuned Hydra out, in one run."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, TrainerCallback, TrainingArguments
from transformers.utils import logging

from .._io.processes import rank_and_world_size
from .._io.progress import shows_bars
from ..data.columns import REMEMBERED
from ..data.descriptions import describe_few_rows, describe_training_data
from ..data.image_changes import CropAndFlip
from ..data.loading import PreparedData, check_has_variety, classes_in, load_data, remember_max_length
from ..data.processors import load_processor
from ..data.rows import DataSource
from ..fusion.probe import TEXT_TOKENS
from ..models.auto import AutoHydra, class_with_new_classifier, config_of, config_with_architecture
from ..models.task import task_name
from .checkpoints import CHECKPOINTS, check_can_train_in, is_finished, record_training
from .epoch_lines import show_progress, tensorboard_in
from .losses import ONE_OF_SEVERAL
from .members import compute_accuracy, settings_of, train_and_save
from .trainer import HydraTrainer, HydraTrainingArguments


if TYPE_CHECKING:
    from ..models.auto import HydraModel

logger = logging.get_logger(f"transformers.{__name__}")


@dataclass
class FineTuned:
    """What `finetune` returns.

    Args:
        model (`PreTrainedModel`): The fine-tuned Hydra, in eval mode.
        train, validation, test (`PreparedData`): The rows of each split, as the model reads them.
        processor (`Any`): The tokenizer, image processor or feature extractor, saved with the model.
        metrics (`dict[str, float]`): Of the validation split.
        warnings (`list[str]`): Sentences about too few rows, and about a model that has not learned.
    """

    model: "HydraModel"
    train: PreparedData
    validation: PreparedData
    test: PreparedData
    processor: Any
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)

    def __repr__(self) -> str:
        metrics = {name.removeprefix("eval_"): value for name, value in self.metrics.items()}
        measured = ", ".join(f"{name} {metrics[name]:.4g}" for name in ("accuracy", "loss") if name in metrics)
        rows = f"{len(self.train):,} training, {len(self.validation):,} validation and {len(self.test):,} test rows"
        sentences = [
            f"{type(self.model).__name__} of {self.model.num_members} members: {self.model.name_or_path}",
            f"{rows}; validation {measured}",
        ]
        return "\n".join([*sentences, *self.warnings])


def finetune(
    model: PreTrainedModel | str | os.PathLike,
    data: Any,
    output_dir: str | os.PathLike,
    *,
    num_members: int = 3,
    trunk_layers: int | float = 0.75,
    learning_rate: float | None = None,
    epochs: float | None = None,
    batch_size: int = 32,
    column: str | Sequence[str] | None = None,
    label: str | None = None,
    label_separator: str | None = None,
    regression: bool = False,
    max_length: int | None = None,
    processor: Any = None,
    seed: int = 0,
    progress: bool = True,
    callbacks: Sequence[TrainerCallback] = (),
    **arguments: Any,
) -> FineTuned:
    """Fine-tunes a Hydra of a pre-trained model on labelled data, in one run.

    The classes and the task are those of the data. Without splits for validation and test, random tenths of the rows are
    split off (at most 3,000 each), the same each time: those that `load_data(data, model, part="validation")` and
    `part="test"` give. Call it again with the same arguments to resume; a finished model is loaded. Others are refused.

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`):
            A pre-trained model of Transformers, its folder or its Hub name. It is left as it is.
        data (`str`, `os.PathLike`, `DataFrame`, `Dataset` or `list[dict]`):
            A data set as `load_data` takes it: a Hub name, a folder, a file, a DataFrame, a `Dataset` or a list of rows.
        output_dir (`str` or `os.PathLike`):
            A new or empty folder. Gets the model with its processor.
        num_members (`int`, defaults to 3), trunk_layers (`int` or `float`, defaults to 0.75):
            As for `AutoHydra.from_backbone`.
        learning_rate (`float`, *optional*):
            The peak learning rate of the trunk; by default lower for more steps (see docs/fine-tuning.md).
        epochs (`float`, *optional*):
            Passes over the training rows; by default 3 to 12, fewer for more rows.
        batch_size (`int`, defaults to 32):
            Rows per step and device.
        column, label, label_separator, max_length, processor:
            As for `load_data`.
        regression (`bool`, defaults to `False`):
            Labels are numbers to predict, also where all of them are whole.
        seed (`int`, defaults to 0):
            Of the new classifiers, the order of the data and dropout.
        progress (`bool`, defaults to `True`):
            Print what was found in the data, its rows, columns, task and classes, and show Trainer's progress bar; where
            stderr is no terminal, one line for each epoch.
        callbacks, arguments (*optional*):
            Further callbacks of Trainer, and arguments of `HydraTrainingArguments` (`class_weights`, `mixing`, ...).

    Returns:
        [`FineTuned`]: The model, its splits and its metrics on the validation split. The model is not calibrated.

    Example:

    ```py
    result = finetune("sentence-transformers/all-MiniLM-L6-v2", "intents.csv", "intents-hydra")
    result.model.calibrate(result.validation, target={"risk": 0.05})
    ```
    """
    folder = Path(output_dir)
    if (epochs is not None and epochs <= 0) or batch_size < 1:
        raise ValueError(f"epochs ({epochs}) and batch_size ({batch_size}) have to be positive")
    check_can_train_in(folder)
    is_name = not isinstance(model, PreTrainedModel)
    columns = {"column": column, "label": label, "label_separator": label_separator}
    source = DataSource(data, part="all", **columns)
    class_names, problem_type = classes_in(source, regression)
    config = config_of(model) if is_name else config_with_architecture(model)
    hydra_class = class_with_new_classifier(config, problem_type)
    config.architectures = [hydra_class.backbone_classes[0].__name__]
    if processor is None or isinstance(processor, (str, os.PathLike)):
        processor = load_processor(processor or (model if is_name else config.name_or_path), config)
    remember_max_length(processor, config, max_length, TEXT_TOKENS)
    hydra = AutoHydra.from_backbone(
        model,
        num_members=num_members,
        trunk_layers=trunk_layers,
        class_names=class_names,
        problem_type=problem_type,
        seed=seed,
    )
    columns |= {"processor": processor, "labelled": True, "max_length": max_length}
    train, validation, test = (load_data(data, hydra, part=p, **columns) for p in ("training", "validation", "test"))
    has_accuracy = task_name(hydra) in ONE_OF_SEVERAL
    remembered = {"column": list(train.columns), "label": train.label, "label_separator": label_separator}
    setattr(hydra.config, REMEMBERED, remembered)
    if progress and rank_and_world_size()[0] == 0:
        print(*describe_training_data((train, validation, test), class_names, problem_type), sep="\n", flush=True)
    check_has_variety(train, "the training split", "to learn")
    warnings = describe_few_rows(len(train), len(class_names))
    for sentence in warnings:
        logger.warning(sentence)
    if train.kind == "image" and train.change is None:
        train = replace(train, change=CropAndFlip())
    by_accuracy = has_accuracy and arguments.get("class_weights") is None  # accuracy hides errors in rare classes
    metric = {"metric_for_best_model": "accuracy" if by_accuracy else "loss", "greater_is_better": by_accuracy}
    settings = {
        "num_train_epochs": epochs_for(len(train)) if epochs is None else epochs,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "logging_strategy": "epoch" if arguments.get("report_to", "none") == "none" else "steps",
        "report_to": "none",
        "disable_tqdm": not (progress and shows_bars()),
        "seed": seed,
    }
    # Trainer makes its folder at once, and that of checkpoints is the sign of an unfinished training.
    finished = is_finished(folder)
    settings |= {"output_dir": os.fspath(folder if finished else folder / CHECKPOINTS), **metric, **arguments}
    training = HydraTrainingArguments(**settings)
    training.learning_rate = learning_rate_for(training, train) if learning_rate is None else learning_rate
    where = data if isinstance(data, (str, os.PathLike)) else None
    where = os.path.realpath(where) if where and os.path.exists(where) else where
    made_with = {"members": num_members, "trunk_layers": trunk_layers, "max_length": max_length}
    made_with |= settings_of(hydra, training, {"training": train, "validation": validation, "test": test})
    # Without one given, the learning rate depends on the number of processes.
    record_training(folder, made_with | {"learning_rate": learning_rate}, data=where, split=train.split)
    if finished:
        hydra = AutoHydra.from_pretrained(folder)
    with tensorboard_in(folder / "runs"):
        trainer = HydraTrainer(
            hydra,
            training,
            train_dataset=train,
            eval_dataset=validation,
            processing_class=processor,
            compute_metrics=compute_accuracy if has_accuracy else None,
            callbacks=list(callbacks),
        )
    show_progress(trainer, progress)
    if not finished:
        train_and_save(trainer, folder)
    hydra.name_or_path = hydra.config.name_or_path = os.path.abspath(folder)  # where its processor is
    metrics = trainer.evaluate()
    result = FineTuned(hydra.eval(), replace(train, change=None), validation, test, processor, metrics, warnings)
    if task_name(hydra) == "single_label_classification":
        useless = no_better_than_most_frequent(metrics["eval_accuracy"], validation.labels, hydra.config)
        result.warnings += useless
        for sentence in useless:
            logger.warning(sentence)
    return result


def epochs_for(rows: int) -> int:
    """3 to 12 passes over a training set of `rows` rows, 9 over 50,000: the steps grow with the square root of the rows.

    >>> [epochs_for(rows) for rows in (500, 50_000, 100_000, 500_000)]
    [12, 9, 6, 3]
    """
    return min(12, max(3, round(9 * (50_000 / rows) ** 0.5)))


def learning_rate_for(arguments: TrainingArguments, train: PreparedData) -> float:
    """For 500 steps 5e-5 on texts and 2.5e-5 on others, lower by the square root for more; from 5e-6 to 5e-5."""
    rows_per_step = arguments.train_batch_size * arguments.world_size * arguments.gradient_accumulation_steps
    steps = math.ceil(arguments.num_train_epochs * math.ceil(len(train) / rows_per_step))
    steps = arguments.max_steps if arguments.max_steps > 0 else max(1, steps)
    for_500 = 5e-5 if train.kind in ("text", "words") else 2.5e-5
    return min(5e-5, max(5e-6, for_500 * (500 / steps) ** 0.5))


def no_better_than_most_frequent(accuracy: float, labels: Sequence[int], config: Any) -> list[str]:
    """A sentence where an accuracy is no better than that of always predicting the most frequent class."""
    label, count = Counter(labels).most_common(1)[0]
    share = count / len(labels)
    if accuracy > share:
        return []
    return [
        f"the validation accuracy is {accuracy:.1%}, and always predicting {config.id2label[label]!r} has {share:.1%}: the model has "
        "learned nothing that helps; try another learning rate, more epochs, or class_weights='balanced'"
    ]
