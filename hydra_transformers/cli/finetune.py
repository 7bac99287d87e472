"""`finetune`: a Hydra of a pre-trained model, or pruned members one by one."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from .._io.records import claim
from .folders import PRUNE_SETTINGS, models_named
from .options import (
    BatchSize,
    Column,
    Seed,
    argument,
    best_device,
    data_name,
    layers_or_share,
    named,
    option,
    positive,
    switch,
    typed,
)


EVALUATION = "evaluation"
GRID = "grid"  # of learning rates
# Fields of HydraTrainingArguments that have an option of their own.
OPTIONS = {
    "output_dir": "--output",
    "num_train_epochs": "--epochs",
    "learning_rate": "--learning-rate",
    "per_device_train_batch_size": "--batch-size",
    "seed": "--seed",
    "report_to": "--report-to",
}


def training_settings(pairs: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Read --set NAME=VALUE: fields of `HydraTrainingArguments`, each as its type."""
    if not pairs:
        return {}
    from transformers import HfArgumentParser

    from ..training import HydraTrainingArguments

    class Parser(HfArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise ValueError(f"--set: {message.removeprefix('argument ')}")

    parser = Parser(HydraTrainingArguments)
    fields = list(HydraTrainingArguments.__dataclass_fields__)
    settings: dict[str, Any] = {}
    for name, value in pairs:
        if name in OPTIONS:
            raise ValueError(f"--set has {name}: use {OPTIONS[name]}")
        if name not in fields:
            close = difflib.get_close_matches(name, fields, n=1)
            meant = f", did you mean {close[0]}?" if close else ""
            raise ValueError(f"--set {name}: HydraTrainingArguments has no such field{meant}")
        if value.lower() in ("none", "null"):
            settings[name] = None
        else:
            read = parser.parse_args(["--output_dir", "", f"--{name}={value}"])
            settings[name] = getattr(read, name)
    return settings


def positive_or_grid(text: str) -> float | str:
    """Read a learning rate, or the word for a grid of them."""
    if text == GRID:
        return GRID
    return positive(text)


def finetune(
    model: argument(
        str, "MODEL", "a pre-trained model, by folder or Hub name; or the output of `prune`, whose members are tuned"
    ),
    data: option(str, "a data set with labels: Hub name, folder or file", "NAME_OR_FOLDER", parser=data_name),
    output: option(Path, "gets the Hydra and its evaluation; run again to continue after a stop", "DIR"),
    column: Column = None,
    label: option(str | None, "the column of labels (default: the only one that fits)", "NAME") = None,
    label_separator: option(str | None, 'between several labels in one cell, such as "|"', "TEXT") = None,
    regression: switch("--regression", "the labels are numbers to predict, also where all of them are whole") = False,
    runs: option(int, "fine-tune so often, and fuse the runs into one model of about the same cost", "R", min=1) = 2,
    members: option(int, "members of each run; 1 for plain fine-tuning", "M", min=1) = 3,
    trunk_layers: option(
        float | None,
        "how many first layers all members share: a number, or a share of all (default: 11 of 12)",
        "N",
        parser=layers_or_share,
    ) = None,
    learning_rate: option(
        float | None,
        'of the last layer (default: by the number of steps); with --recipe, "grid" chooses the recipe\'s best one on '
        "validation data",
        "LR",
        parser=positive_or_grid,
    ) = None,
    epochs: option(int | None, "passes over the data (default: 3 to 12, fewer for more rows)", "N", min=1) = None,
    recipe: option(
        Literal["imagenet1k", "cifar100", "sst2"] | None, "pruned members: the paper's fine-tuning for this data (D.2)"
    ) = None,
    max_length: option(int | None, "cut texts to N tokens, also when it predicts (default: 128)", "N", min=1) = None,
    batch_size: BatchSize = 32,
    seed: Seed = 0,
    report_to: option(
        list[str] | None, "log the training there, as Trainer does: tensorboard, wandb, ...; may be repeated", "NAME"
    ) = None,
    further: option(
        list[tuple] | None,
        "any other field of HydraTrainingArguments, such as weight_decay=0.1; may be repeated",
        "NAME=VALUE",
        flag="--set",
        parser=named,
    ) = None,
) -> None:
    """Fine-tune a pre-trained model as an ensemble (a Hydra), and evaluate it."""
    # What both kinds of models take.
    names = models_named([model])
    columns = {"column": column or None, "label": label, "label_separator": label_separator}
    arguments = training_settings(further or [])
    if report_to:
        from ..training.trackers import check_can_report_to

        check_can_report_to(report_to)
        arguments["report_to"] = report_to

    # Pruned members, one by one.
    if len(names) > 1:
        if (runs, members, trunk_layers, regression, max_length) != (2, 3, None, False, None):
            raise ValueError(
                "members were pruned: leave out --runs, --members, --trunk-layers, --regression, --max-length"
            )
        training = {"per_device_train_batch_size": batch_size, "per_device_eval_batch_size": batch_size} | arguments
        if epochs is not None:
            training["num_train_epochs"] = epochs
        if learning_rate == GRID:
            training["learning_rates"] = GRID
        elif learning_rate is not None:
            training["learning_rate"] = learning_rate
        _tune_members(names, data, output, columns, seed, recipe, **training)
        return

    # A pre-trained model.
    if recipe is not None or learning_rate == GRID:
        raise ValueError(f"--recipe and --learning-rate {GRID} are for members that `prune` made: leave them out")
    from ..serving.saved_models import load_config

    load_config(model)  # its errors are clearer
    from ..training import finetune as train

    result = train(
        model,
        data,
        output,
        runs=runs,
        num_members=members,
        trunk_layers=trunk_layers,
        learning_rate=learning_rate,
        epochs=epochs,
        batch_size=batch_size,
        regression=regression,
        max_length=max_length,
        seed=seed,
        **columns,
        **arguments,
    )

    # What came of it.
    from ..reports import evaluate_uncertainty
    from ..training.finetune import describe_runs
    from .evaluate import write_report

    print(*describe_runs(result.runs), sep="\n")
    models = {output.name: result.model.to(best_device())}
    report = evaluate_uncertainty(models, result.test, batch_size=batch_size)
    report.about["data"] = f"{data}, the rows kept for the test"
    write_report(report, output / EVALUATION)
    options = typed(data=data, split="validation", **columns, coverage=0.9)
    print(f"The Hydra is in {output}. Next: hydra-transformers calibrate {output} {options} --output ...")


def _tune_members(
    names: list[str], data: str, output: Path, columns: dict, seed: int, recipe: str | None, **training: Any
) -> None:
    """Fine-tune pruned members, each by itself.

    columns, training: arguments of `load_data` and of `finetune_members`
    """
    from .._io.processes import on_one_process
    from ..data.loading import load_data
    from ..data.processors import load_processor
    from ..hub.member_heads import copy_circuits
    from ..model_info import ModelInfo
    from ..serving.saved_models import load_config, load_model
    from ..training import finetune_members

    config = load_config(names[0])
    if ModelInfo.of(config).is_zero_shot:
        raise ValueError(
            f"{names[0]} learns from pairs of images and texts, which this command does not read: fine-tune it in "
            'Python, with finetune_members(members, "clip-lit", ...), or fuse the members as they are'
        )
    on_one_process(lambda: claim(output, PRUNE_SETTINGS, {"members": len(names)}))

    # The rows.
    processor = load_processor(names[0], config)
    columns = {**columns, "processor": processor, "labelled": True}
    train = load_data(data, config, part="training", **columns)
    validation = load_data(data, config, part="validation", **columns)
    print(train.notes[0], *validation.notes, sep="\n", flush=True)

    # The training, and what a fused model of the members will need.
    models = [load_model(name) for name in names]
    finetune_members(models, recipe, train, validation, output, seed=seed, **training)

    def complete() -> None:
        copy_circuits(Path(names[0]).parent, output)
        for index in range(len(names)):
            processor.save_pretrained(output / f"member-{index}")

    on_one_process(complete)
    print(f"{len(names)} members are in {output}. Next: hydra-transformers fuse {output} --output ...")
