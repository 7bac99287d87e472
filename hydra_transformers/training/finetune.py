"""`finetune`: a pre-trained model and data in, a fine-tuned Hydra out."""

import copy
import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel, TrainerCallback
from transformers.utils import logging

from .._io.files import write_atomically
from .._io.processes import on_one_process, rank_and_world_size
from .._io.progress import shows_bars
from .._io.records import read_settings
from ..data.columns import REMEMBERED, DataSource
from ..data.descriptions import describe_few_rows, describe_training_data
from ..data.image_changes import CropAndFlip
from ..data.loading import PreparedData, check_has_variety, classes_in, load_data, remember_max_length
from ..data.processors import load_processor
from ..data.rows import load_once
from ..fusion.probe import TEXT_TOKENS
from ..fusion.soup import soup
from ..models.auto import AutoHydra, class_with_new_classifier, config_of, config_with_architecture
from ..models.task import task_name
from . import defaults
from .checkpoints import CHECKPOINTS, check_can_train_in, is_finished, record_training, remove_checkpoints
from .epoch_lines import show_progress, tensorboard_in
from .losses import ONE_OF_SEVERAL
from .members import compute_accuracy, settings_of, train_and_save
from .trackers import check_can_report_to
from .trainer import HydraTrainer, HydraTrainingArguments


if TYPE_CHECKING:
    from ..models.auto import HydraModel

logger = logging.get_logger(f"transformers.{__name__}")

SCORES = "runs.json"  # what each run and their fusion reached on the validation rows
FUSED, SOUP = "fused", "soup"


@dataclass
class FineTuned:
    """What `finetune` returns.

    Args:
        model (`PreTrainedModel`): The fine-tuned Hydra, in eval mode.
        train, validation, test (`PreparedData`): The rows of each split, as the model reads them.
        processor (`Any`): The tokenizer, image processor or feature extractor, saved with the
            model.
        metrics (`dict[str, float]`): Of the validation split.
        warnings (`list[str]`): Sentences about too few rows, about a model that has not learned,
            and about runs that do not gain from being fused.
        runs (`dict[str, dict[str, float]]`): Of several runs, the metrics of each on the validation
            split ("run 1", ...), of the mean of their weights ("soup"), and of the model ("fused").
    """

    model: "HydraModel"
    train: PreparedData
    validation: PreparedData
    test: PreparedData
    processor: Any
    metrics: dict[str, float]
    warnings: list[str] = field(default_factory=list)
    runs: dict[str, dict[str, float]] = field(default_factory=dict)

    def __repr__(self) -> str:
        name = type(self.model).__name__
        rows = f"{len(self.train):,} training, {len(self.validation):,} validation and {len(self.test):,} test rows"
        sentences = [
            f"{name} of {self.model.num_members} members: {self.model.name_or_path}",
            f"{rows}; validation {_measured(self.metrics)}",
            *describe_runs(self.runs),
            *self.warnings,
        ]
        return "\n".join(sentences)


@dataclass(frozen=True)
class Splits:
    """The rows of a data set by their purpose, and what their labels are.

    class_names: in the order of their indices
    problem_type: as `classes_in` names it
    """

    train: PreparedData
    validation: PreparedData
    test: PreparedData
    class_names: list[str]
    problem_type: str | None

    @property
    def by_name(self) -> dict[str, PreparedData]:
        return {"training": self.train, "validation": self.validation, "test": self.test}

    @property
    def notes(self) -> list[str]:
        """Sentences about what was found: the rows of each split, columns, task and classes."""
        return describe_training_data(list(self.by_name.values()), self.class_names, self.problem_type)


@dataclass(frozen=True)
class Start:
    """The pre-trained model that all runs begin with.

    model: itself, its folder or its Hub name
    processor: the tokenizer, image processor or feature extractor
    options: of `AutoHydra.from_backbone`, all but the seed
    """

    model: Any
    processor: Any
    options: Mapping[str, Any]

    def new_hydra(self, seed: int) -> "HydraModel":
        """Return a Hydra of the model, with classifiers that the seed decides."""
        return AutoHydra.from_backbone(self.model, seed=seed, **self.options)


def finetune(
    model: PreTrainedModel | str | os.PathLike,
    data: Any,
    output_dir: str | os.PathLike,
    *,
    runs: int = defaults.RUNS,
    num_members: int = defaults.MEMBERS,
    trunk_layers: int | float | None = None,
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
    """Fine-tune a Hydra of a pre-trained model on labelled data, in one run or in several.

    Several runs are fused into one model. The classes and the task are those of the data. Without
    splits for validation and test, random tenths of the rows are split off (at most 3,000 each),
    the same each time: those that `load_data(data, model, part="validation")` and `part="test"`
    give. Call it again with the same arguments to resume; a finished model is loaded. Others are
    refused.

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`):
            A pre-trained model of Transformers, its folder or its Hub name. It is left as it is.
        data (`str`, `os.PathLike`, `DataFrame`, `Dataset` or `list[dict]`):
            A data set as `load_data` takes it: a Hub name, a folder, a file, a DataFrame, a
            `Dataset` or a list of rows.
        output_dir (`str` or `os.PathLike`):
            A new or empty folder. Gets the model with its processor.
        runs (`int`, defaults to 2):
            How often to fine-tune, each time with other classifiers and another order of the data.
            The runs are fused into one model of `runs * num_members` members, which costs about as
            much as one run's.
        num_members (`int`, defaults to 3):
            The members of each run. With 1 a run is a plain fine-tuning.
        trunk_layers (`int` or `float`, *optional*):
            How many first layers all members share, or which share of the layers; of several plain
            runs, how many are merged when they are fused. By default 11 of 12; of plain runs 9 of
            12 are merged.
        learning_rate (`float`, *optional*):
            The peak learning rate of the last layer; by default lower for more steps (see
            docs/fine-tuning.md).
        epochs (`float`, *optional*):
            Passes of each run over the training rows; by default 3 to 12, fewer for more rows.
        batch_size (`int`, defaults to 32):
            Rows per step and device.
        column, label, label_separator, max_length, processor:
            As for `load_data`.
        regression (`bool`, defaults to `False`):
            Labels are numbers to predict, also where all of them are whole.
        seed (`int`, defaults to 0):
            Of the new classifiers, the order of the data and dropout; run i has `seed + i`.
        progress (`bool`, defaults to `True`):
            Print what was found in the data, its rows, columns, task and classes, and show
            Trainer's progress bar; where stderr is no terminal, one line for each epoch.
        callbacks, arguments (*optional*):
            Further callbacks of Trainer, and arguments of `HydraTrainingArguments` (`layer_decay`,
            `mixing`, ...).

    Returns:
        [`FineTuned`]: The model, its splits and its metrics on the validation split. The model is
        not calibrated.

    Example:

    ```py
    result = finetune("sentence-transformers/all-MiniLM-L6-v2", "intents.csv", "intents-hydra")
    result.model.calibrate(result.validation, target={"risk": 0.05})
    ```
    """
    folder = Path(output_dir)
    if (epochs is not None and epochs <= 0) or batch_size < 1:
        raise ValueError(f"epochs ({epochs}) and batch_size ({batch_size}) have to be positive")
    if runs < 1:
        raise ValueError(f"runs is {runs}: pass 1 or more")
    check_can_report_to(arguments.get("report_to"))
    check_can_train_in(folder)

    # What there is to learn, and the model that learns it
    source = load_once(DataSource(data, part="all", column=column, label=label, label_separator=label_separator))
    class_names, problem_type = classes_in(source, regression)
    trunk = defaults.TRUNK if trunk_layers is None else trunk_layers
    new = {"class_names": class_names, "problem_type": problem_type}
    start = load_start(model, processor, max_length, num_members=num_members, trunk_layers=trunk, **new)
    hydra = start.new_hydra(seed)
    splits = load_splits(source, hydra, start.processor, max_length, **new)
    warnings = _describe(splits, progress)

    # How it is trained
    training = _Training(
        splits=splits,
        start=start,
        arguments=arguments,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        progress=progress,
        callbacks=callbacks,
        hydra=hydra,
    )
    options = {"members": num_members, "trunk_layers": trunk_layers, "max_length": max_length, "runs": runs}
    settings = options | training.settings_of(hydra, folder, seed)
    record_training(folder, settings, data=_place_of(data), split=splits.train.split)

    # The training
    hydra = training.train(runs, folder, seed, _layers_to_merge(hydra, trunk_layers))
    hydra.name_or_path = os.path.abspath(folder)  # where its processor is
    hydra.config.name_or_path = hydra.name_or_path

    # What came of it
    metrics = training.evaluate(hydra, folder, seed)
    scores = {}
    if runs > 1:
        scores = read_settings(folder / SCORES)
    warnings += _describe_result(hydra, metrics, splits, scores)
    return FineTuned(
        model=hydra.eval(),
        train=replace(splits.train, change=None),
        validation=splits.validation,
        test=splits.test,
        processor=start.processor,
        metrics=metrics,
        warnings=warnings,
        runs=scores,
    )


def load_start(
    model: PreTrainedModel | str | os.PathLike, processor: Any, max_length: int | None, **options: Any
) -> Start:
    """Return a pre-trained model with its processor; the weights are not loaded yet.

    Args:
        model (`PreTrainedModel`, `str` or `os.PathLike`): The model, its folder or its Hub name.
        processor (`Any`): The processor, its folder or its Hub name; None for the model's own.
        max_length (`int`, *optional*): The tokens that a text is cut to, which a tokenizer
            remembers.
        options: Of `AutoHydra.from_backbone`, all but the seed.
    """
    if isinstance(model, PreTrainedModel):
        config = config_with_architecture(model)
        name = config.name_or_path
    else:
        config = config_of(model)
        name = model
    hydra_class = class_with_new_classifier(config, options["problem_type"])
    config.architectures = [hydra_class.backbone_classes[0].__name__]
    if processor is None or isinstance(processor, (str, os.PathLike)):
        processor = load_processor(processor or name, config)
    remember_max_length(processor, config, max_length, TEXT_TOKENS)
    return Start(model, processor, options)


def load_splits(
    source: DataSource,
    hydra: "HydraModel",
    processor: Any,
    max_length: int | None,
    class_names: list[str],
    problem_type: str | None,
) -> Splits:
    """Return the rows to train, validate and test on, as `hydra` reads them.

    Its config remembers their columns. Images to train on are cropped and flipped at random.
    """
    load = partial(
        load_data,
        source.data,
        hydra,
        column=source.column,
        label=source.label,
        label_separator=source.label_separator,
        processor=processor,
        labelled=True,
        max_length=max_length,
    )
    train = load(part="training")
    validation = load(part="validation")
    test = load(part="test")
    remembered = {"column": list(train.columns), "label": train.label, "label_separator": source.label_separator}
    setattr(hydra.config, REMEMBERED, remembered)
    if train.kind == "image" and train.change is None:
        train = replace(train, change=CropAndFlip())
    return Splits(train, validation, test, class_names, problem_type)


def _describe(splits: Splits, progress: bool) -> list[str]:
    """Print what was found in the data, and return what there is to warn of; raise where there is
    nothing to learn."""
    if progress and rank_and_world_size()[0] == 0:
        print(*splits.notes, sep="\n", flush=True)
    check_has_variety(splits.train, "the training split", "to learn")
    warnings = describe_few_rows(len(splits.train), len(splits.class_names))
    for sentence in warnings:
        logger.warning(sentence)
    return warnings


def _place_of(data: Any) -> str | os.PathLike | None:
    """Return where data are, as a record names them; None for data in memory."""
    if not isinstance(data, (str, os.PathLike)):
        return None
    if os.path.exists(data):
        return os.path.realpath(data)
    return data


def _layers_to_merge(hydra: "HydraModel", trunk_layers: int | float | None) -> int | float:
    """Return how many layers of several runs are merged when they are fused."""
    if hydra.num_members > 1:
        return hydra.config.trunk_layers
    if trunk_layers is None:
        return defaults.MERGED
    return trunk_layers


@dataclass
class _Training:
    """How the runs of one call are trained: they differ in their seeds and folders alone.

    arguments: of `HydraTrainingArguments`, as the user gave them
    hydra: the model of the first run, which says what the others learn
    """

    splits: Splits
    start: Start
    arguments: Mapping[str, Any]
    learning_rate: float | None
    epochs: float | None
    batch_size: int
    progress: bool
    callbacks: Sequence[TrainerCallback]
    hydra: "HydraModel"

    def __post_init__(self) -> None:
        self.has_accuracy = task_name(self.hydra) in ONE_OF_SEVERAL

    def arguments_for(self, folder: Path, seed: int) -> HydraTrainingArguments:
        """Return the arguments of a training that leaves its model in `folder`."""
        train = self.splits.train
        task = task_name(self.hydra)
        epochs = self.epochs
        if epochs is None:
            epochs = defaults.epochs_for(len(train), train.kind)
        # Accuracy hides errors in rare classes.
        by_accuracy = self.has_accuracy and self.arguments.get("class_weights") is None
        # Trainer makes its folder at once, and that of checkpoints is the sign of an unfinished
        # training.
        output_dir = folder / CHECKPOINTS
        if is_finished(folder):
            output_dir = folder
        logs_to_terminal = self.arguments.get("report_to", "none") == "none"
        settings = {
            "output_dir": os.fspath(output_dir),
            "num_train_epochs": epochs,
            "classifier_learning_rate": defaults.classifier_rate_for(task),
            "mixing": defaults.mixing_for(train.kind, self.splits.problem_type),
            "per_device_train_batch_size": self.batch_size,
            "per_device_eval_batch_size": self.batch_size,
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "save_total_limit": 1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy" if by_accuracy else "loss",
            "greater_is_better": by_accuracy,
            "logging_strategy": "epoch" if logs_to_terminal else "steps",
            "report_to": "none",
            "disable_tqdm": not (self.progress and shows_bars()),
            "seed": seed,
        }
        training = HydraTrainingArguments(**settings | self.arguments)
        training.learning_rate = self.learning_rate
        if self.learning_rate is None:
            training.learning_rate = defaults.learning_rate_for(training, train)
        return training

    def settings_of(self, hydra: "HydraModel", folder: Path, seed: int) -> dict[str, Any]:
        """Return with what a training that was cut off has to go on."""
        settings = settings_of(hydra, self.arguments_for(folder, seed), self.splits.by_name)
        # Without one given, the learning rate depends on the number of processes.
        return settings | {"learning_rate": self.learning_rate}

    def trainer(self, hydra: "HydraModel", folder: Path, seed: int, run: int = 1, runs: int = 1) -> HydraTrainer:
        with tensorboard_in(self.logs_of(folder)):
            trainer = HydraTrainer(
                hydra,
                self.arguments_for(folder, seed),
                train_dataset=self.splits.train,
                eval_dataset=self.splits.validation,
                processing_class=self.start.processor,
                compute_metrics=compute_accuracy if self.has_accuracy else None,
                callbacks=[copy.copy(callback) for callback in self.callbacks],  # some count, each run for itself
            )
        show_progress(trainer, self.progress, run, runs)
        return trainer

    def logs_of(self, folder: Path) -> Path:
        """Return where TensorBoard finds a run's logs: beside the model, which stays."""
        if folder.parent.name == CHECKPOINTS:
            return folder.parent.parent / "runs" / folder.name
        return folder / "runs"

    def train(self, runs: int, folder: Path, seed: int, merged_layers: int | float) -> "HydraModel":
        """Train to the end, in one run or in several that are fused; a finished model is loaded."""
        if is_finished(folder):
            return AutoHydra.from_pretrained(folder)
        if runs == 1:
            train_and_save(self.trainer(self.hydra, folder, seed), folder)
            return self.hydra
        for index in range(runs):
            self.train_run(index, runs, folder, seed)
        return self.fuse_runs(runs, folder, merged_layers, seed)

    def train_run(self, index: int, runs: int, folder: Path, seed: int) -> None:
        """Train one of several runs in its folder, or go on with it, unless it is finished."""
        place = run_folder(folder, index)
        if is_finished(place):
            return
        if self.progress and rank_and_world_size()[0] == 0:
            print(f"run {index + 1} of {runs}", flush=True)
        # Each run has other classifiers, and none of its members has those of another run.
        hydra = self.start.new_hydra(seed + index * self.hydra.num_members)
        setattr(hydra.config, REMEMBERED, getattr(self.hydra.config, REMEMBERED))
        record_training(place, self.settings_of(hydra, place, seed + index))
        train_and_save(self.trainer(hydra, place, seed + index, index + 1, runs), place)

    def fuse_runs(self, runs: int, folder: Path, trunk_layers: int | float, seed: int) -> "HydraModel":
        """Fuse finished runs, leave the model and their scores in `folder`, and remove them."""
        models = [AutoHydra.from_pretrained(run_folder(folder, index)) for index in range(runs)]
        hydra = AutoHydra.from_pruned_members(models, defaults.SHARED_BY_RUNS, trunk_layers)
        setattr(hydra.config, REMEMBERED, getattr(self.hydra.config, REMEMBERED))

        # What each run alone, the mean of their weights and their fusion reach
        candidates = {f"run {index + 1}": model for index, model in enumerate(models)}
        candidates[SOUP] = soup(models)
        candidates[FUSED] = hydra
        scores = {name: self._score(candidate, folder, seed) for name, candidate in candidates.items()}

        # The scores first: with the model the training is finished.
        trainer = self.trainer(hydra, folder, seed)
        on_one_process(lambda: write_atomically(folder / SCORES, json.dumps(scores, indent=1) + "\n"))
        trainer.save_model(os.fspath(folder))
        trainer.accelerator.wait_for_everyone()
        on_one_process(lambda: remove_checkpoints(folder))
        return hydra

    def evaluate(self, hydra: "HydraModel", folder: Path, seed: int) -> dict[str, float]:
        """Return the metrics of the validation rows, which no log of a training gets."""
        unlogged = replace(self, arguments={**self.arguments, "report_to": "none"})
        return unlogged.trainer(hydra, folder, seed).evaluate()

    def _score(self, model: "HydraModel", folder: Path, seed: int) -> dict[str, float]:
        metrics = self.evaluate(model, folder, seed)
        return {name: metrics[f"eval_{name}"] for name in ("accuracy", "loss") if f"eval_{name}" in metrics}


def run_folder(folder: Path, index: int) -> Path:
    """Return the folder of one of several runs, which is removed when they are fused."""
    return folder / CHECKPOINTS / f"run-{index}"


def _measured(metrics: Mapping[str, float]) -> str:
    """Return accuracy and loss in words, as far as they were measured."""
    values = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    words = [f"{name} {values[name]:.4g}" for name in ("accuracy", "loss") if name in values]
    return ", ".join(words)


def describe_runs(runs: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a line for each of several runs, and for what became of them."""
    return [f"{name}: {_measured(metrics)}" for name, metrics in runs.items()]


def _describe_result(
    hydra: "HydraModel", metrics: Mapping[str, float], splits: Splits, scores: Mapping[str, Mapping[str, float]]
) -> list[str]:
    """Return, and log, what there is to warn of in a trained model."""
    sentences = []
    if task_name(hydra) == "single_label_classification":
        sentences += no_better_than_most_frequent(metrics["eval_accuracy"], splits.validation.labels, hydra.config)
    if scores:
        sentences += no_gain_by_fusing(scores)
    for sentence in sentences:
        logger.warning(sentence)
    return sentences


def no_gain_by_fusing(scores: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return a sentence where the fused model has a higher loss on the validation rows than its
    runs have on average."""
    loss_of_run = mean(metrics["loss"] for name, metrics in scores.items() if name not in (FUSED, SOUP))
    loss = scores[FUSED]["loss"]
    if loss <= loss_of_run:
        return []
    return [
        f"fusing the runs did not pay: the validation loss is {loss:.4g}, and that of a run {loss_of_run:.4g} on "
        "average; pass runs=1, or fewer trunk_layers"
    ]


def no_better_than_most_frequent(accuracy: float, labels: Sequence[int], config: Any) -> list[str]:
    """Return a sentence where always predicting the most frequent class is as accurate."""
    label, count = Counter(labels).most_common(1)[0]
    share = count / len(labels)
    if accuracy > share:
        return []
    return [
        f"the validation accuracy is {accuracy:.1%}, and always predicting {config.id2label[label]!r} has "
        f"{share:.1%}: the model has learned nothing that helps; try another learning rate, more epochs, or "
        "class_weights='balanced'"
    ]
