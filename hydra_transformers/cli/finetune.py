"""`finetune`: a pre-trained model several times, pruned members one by one, or a Hydra as a whole."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Subset
from transformers import PreTrainedConfig

from .._io.access import access_to
from .._io.processes import on_one_process
from ..data.image_changes import random_changes
from ..data.loading import PreparedData, check_has_variety, classes_in, remember_max_length
from ..data.processors import load_processor
from ..data.rows import MOST_HELD_OUT_ROWS, SPLITS_TO_CUT, overlap
from ..data.tags import TOKEN_CLASSIFICATION
from ..fusion import number_of_layers, saved_tower_configs
from ..fusion.probe import TEXT_TOKENS
from ..hub.member_heads import copy_circuits
from ..models.auto import CLASSIFIERS, TOKEN_CLASSIFIERS, is_zero_shot
from ..training import RECIPES, Recipe, finetune_from_pretrained, finetune_members, tune_jointly
from ..training.from_pretrained import check_classifiers, check_trainings, fine_tunings_within
from ..training.recipes import base_recipe, recipe_for
from . import flags
from .folders import are_fine_tunings, check_is_hydra, claim_for_training, load_config, load_model, members_in
from .options import argument, check_named_once, choice, layers_or_share, learning_rate, option, switch


VALIDATES_ON_FIRST_ROWS = {"sst2"}
RecipeName = option(
    choice(sorted(RECIPES)) | None,
    "how to train (default: finetune-images or finetune-texts for a pre-trained model, tune-images or tune-texts otherwise, "
    "with epochs by the number of rows and early stopping; imagenet1k, cifar100 and sst2 are the paper's)",
)


def finetune(
    model: argument(
        str,
        "DIR_OR_MODEL",
        "the output of `prune`; or a pre-trained model, by folder or Hub name, which is fine-tuned several times, each time "
        "with a new classifier for the classes of the data; or with --teacher a Hydra",
    ),
    data: flags.PartOptions,
    output: option(Path, "gets the trained members; run again to continue after a stop", "DIR"),
    recipe: RecipeName = None,
    members: option(int | None, "fine-tunings of a pre-trained model (default: 3)", "M", min=1) = None,
    trainings: flags.Trainings = None,
    classifiers: flags.Classifiers = None,
    teacher: option(
        str | None,
        "tune a Hydra as a whole, which also learns from this model: best its own members with nothing merged (`fuse "
        "--trunk-layers 0`). The result is in DIR/member-0",
        "MODEL",
    ) = None,
    validation_split: option(
        str | None,
        "default: with --part training the part for validation; otherwise a random tenth of the training rows, at most "
        "3,000; with the recipe sst2 the first rows",
    ) = None,
    learning_rates: option(
        list[Any] | None, 'to choose from by validation, or "grid" for the recipe\'s', "LR...", parser=learning_rate
    ) = None,
    epochs: flags.Epochs = None,
    max_steps: flags.MaxSteps = None,
    regression: flags.Regression = False,
    variance: switch(
        "--variance",
        "for numbers: learn a variance beside each, which shows how noisy the data are (Gaussian likelihood)",
    ) = False,
    report_to: flags.ReportTo = "none",
    trunk_layers: option(
        Any,
        "do not train the first N layers, or a share such as 0.75, nor the embeddings, which fused members then share",
        "N",
        parser=layers_or_share,
    ) = 0,
    seed: flags.Seed = 0,
    batch_size: flags.BatchSize = 32,
    divide: flags.Divide = "members",
) -> None:
    """Fine-tune a pre-trained model several times, pruned members one by one, or a Hydra as a whole with a teacher."""
    check_training(epochs, max_steps, report_to)
    if data.part not in (None, "training"):
        raise ValueError(f"--part {data.part} is held out from training: pass --part training, or leave it out")
    source = Path(model)
    is_one = not source.is_dir() or (source / "config.json").exists()
    is_pretrained = is_one and teacher is None
    given = {"--members": members, "--trainings": trainings, "--classifiers": classifiers}
    given |= {"--regression": regression or None, "--variance": variance or None}
    for flag, value in given.items():
        if not is_pretrained and value is not None:
            raise ValueError(f"{flag} is for a pre-trained model, {model} has its members: leave it out")
    if teacher is not None and not is_one:
        raise ValueError(f"--teacher is for a Hydra, {model} holds members: fuse them first")
    folders = [] if is_pretrained else [source] if is_one else members_in(source)
    name = str(folders[0]) if not is_one else model
    config = load_config(name)
    if teacher is not None:
        check_is_hydra(config, model)
        load_config(teacher)  # its errors come before the data are read
    check_trainable(model, config, is_pretrained)
    check_trunk(trunk_layers, name, config)
    named = RECIPES[recipe or base_recipe(config, is_pretrained)]
    check_named_once(learning_rates or [], "--learning-rates")
    if "grid" in (learning_rates or []) and len(learning_rates) > 1:
        raise ValueError("--learning-rates has numbers and the word grid: pass either")
    count = (members or 3) if is_pretrained else len(folders)
    if trainings is not None:
        check_trainings(trainings, count, "--trainings", or_more=False)
    if classifiers is not None:
        check_classifiers(classifiers, fine_tunings_within(trainings, count), "--classifiers")
    of_several = is_pretrained or are_fine_tunings(source)
    on_one_process(lambda: claim_for_training(output, source, count, of_several, teacher is not None))
    processor = load_processor(data.processor or name, config)
    remember_max_length(processor, config, data.max_length, TEXT_TOKENS)
    if is_pretrained:
        classes, problem_type = name_classes(config, data, data.part, regression)
        if variance and problem_type != "regression":
            raise ValueError(
                "--variance is for numbers, and the labels are classes: pass --regression, too, or leave it out"
            )
        if problem_type == TOKEN_CLASSIFICATION:  # whose tokenizer has to read lists of words
            processor = load_processor(data.processor or name, config)
            remember_max_length(processor, config, data.max_length, TEXT_TOKENS)
        of_what = {
            "multi_label_classification": f"{len(classes)} classes of which a row may have several",
            TOKEN_CLASSIFICATION: f"{len(classes)} classes of tokens, the tags of words",
            "regression": f"numbers, {classes[0]} (regression)",
        }
        heads = of_what.get(problem_type, f"{len(classes)} classes")
        print(f"{count} fine-tunings of {name} with new classifiers for {heads}")
    train, validation = _train_and_validation(data, validation_split, seed, config, processor, named)
    chosen = recipe_for(recipe, config, train, is_pretrained, epochs, max_steps)
    chosen = replace(chosen, trunk_layers=trunk_layers)
    settings = {
        "seed": seed,
        "learning_rates": "grid" if learning_rates == ["grid"] else learning_rates or None,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "report_to": report_to,
        "dataloader_pin_memory": torch.cuda.is_available(),
        "divide": divide,
    }
    if is_pretrained:
        finetune_from_pretrained(
            name,
            count,
            chosen,
            train,
            validation,
            output,
            class_names=classes,
            problem_type=problem_type,
            trainings=trainings,
            classifiers=classifiers,
            predicts_variance=variance,
            **settings,
        )
    elif teacher is not None:
        on_one_process(lambda: copy_circuits(source, output))
        tune_jointly(load_model(model), chosen, train, validation, output, load_model(teacher), **settings)
    else:
        on_one_process(lambda: copy_circuits(source, output))
        models = [load_model(str(folder)) for folder in folders]
        finetune_members(models, chosen, train, validation, output, **settings)
    on_one_process(lambda: [processor.save_pretrained(output / f"member-{index}") for index in range(count)])
    if teacher is not None:
        print(f"Next: hydra-transformers evaluate {output / 'member-0'} --data ...")
        print(f"(Or hydra-transformers fuse {output} --output ..., for a folder that is ready for the Hub.)")
    elif is_pretrained:
        print(f"Next: hydra-transformers prune {output} --data ... --output ...")
        print("(Or hydra-transformers fuse: fine-tunings make a Hydra without any pruning, too.)")
    else:
        print(f"Next: hydra-transformers fuse {output} --output ...")


# Checks that `build` makes, too


def check_training(epochs: int | None, max_steps: int | None, report_to: str) -> None:
    from transformers.integrations import get_available_reporting_integrations

    if epochs is not None and max_steps is not None:
        raise ValueError("--epochs and --max-steps are both lengths of a training: pass one of them")
    known = ["none", *get_available_reporting_integrations()]
    if report_to not in ("all", *known):
        raise ValueError(
            f"--report-to {report_to} is unknown or not installed: install it, or pass one of {', '.join(known)}"
        )


def check_trainable(name: str, config: PreTrainedConfig, is_pretrained: bool = True) -> None:
    """Refuses models without a classifier to train. A pre-trained model of two towers is turned into an image classifier."""
    if is_zero_shot(config):
        if not is_pretrained:
            raise ValueError(
                f"{name} has two towers and no classifier to train, its members are fused as they are: continue with `fuse`"
            )
        if config.model_type in CLASSIFIERS:
            config.architectures = [CLASSIFIERS[config.model_type].__name__]
    if is_pretrained and hasattr(config, "kept_heads"):
        raise ValueError(f"{name} is a single Hydra: pass a pre-trained model of Transformers, or a folder of members")


def check_trunk(trunk_layers: int | float | None, name: str, config: PreTrainedConfig) -> None:
    layers = min(map(number_of_layers, saved_tower_configs(config).values()))
    if trunk_layers is not None and trunk_layers > layers:
        raise ValueError(f"--trunk-layers is {trunk_layers}, {name} has {layers} layers: pass 0 to {layers}")


# Data


def name_classes(
    config: PreTrainedConfig, data: flags.DataOptions, part: str | None = None, regression: bool = False
) -> tuple[list[str], str | None]:
    """Puts the data's classes into the config of a pre-trained model, and returns them with the problem type.

    regression: whether labels are numbers, be they whole or not
    """
    with access_to(data.data, "data set"):
        source = data.source(split=data.split or (SPLITS_TO_CUT if part is None else None), part=part)
        classes, problem_type = classes_in(source, regression)
    if (
        problem_type is None
        and len(classes) > 2
        and all(name.removeprefix("LABEL_").lstrip("-").isdigit() for name in classes)
    ):
        print(
            f"The labels are whole numbers, taken as {len(classes)} classes: pass --regression if they are numbers to predict."
        )
    config.problem_type = None if problem_type == TOKEN_CLASSIFICATION else problem_type
    if problem_type == TOKEN_CLASSIFICATION:
        if config.model_type not in TOKEN_CLASSIFIERS:
            raise ValueError(
                f"{data.data} has tags for words, and a {config.model_type} has no classifier of tokens: pass one of "
                f"{', '.join(TOKEN_CLASSIFIERS)}"
            )
        config.architectures = [TOKEN_CLASSIFIERS[config.model_type].__name__]
    config.id2label, config.label2id = dict(enumerate(classes)), {each: at for at, each in enumerate(classes)}
    return classes, problem_type


def _train_and_validation(
    data: flags.PartOptions,
    validation_split: str | None,
    seed: int,
    config: PreTrainedConfig,
    processor: Any,
    recipe: Recipe,
) -> tuple[Any, Any]:
    rows = data.read_part(config, processor, prefer=("train",))
    check_has_variety(rows, data.data, "to learn")
    train = replace(rows, change=change_by(rows, recipe))
    if validation_split is not None:
        validation = data.read(config, processor, split=validation_split)
        if overlap(rows.split, validation.split):
            raise ValueError(
                f"--validation-split {validation.split} has rows of the training split {rows.split}: pass another, or leave it "
                "out to hold out a part"
            )
        return train, validation
    if data.part is not None:
        validation = data.read(config, processor, split=data.split, part="validation", quiet=True)
    else:
        held_out, others = _held_out(len(rows), seed, recipe.name in VALIDATES_ON_FIRST_ROWS)
        train, validation = Subset(train, others), Subset(rows, held_out)
    print(f"{len(train):,} rows to train, {len(validation):,} held out for validation")
    return train, validation


def change_by(rows: PreparedData, recipe: Recipe) -> Callable[[Any], Any] | None:
    """The recipe's random changes of training images."""
    if rows.kind != "image":
        return None
    change, unknown = random_changes(recipe.train_transforms)
    if unknown:
        print(f"the recipe's {', '.join(unknown)} is unknown here and left out")
    return change


def _held_out(rows: int, seed: int, takes_first: bool) -> tuple[Sequence[int], Sequence[int]]:
    """A tenth of the rows, the first or random ones, and the others."""
    count = min(MOST_HELD_OUT_ROWS, max(1, rows // 10))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    order = range(rows) if takes_first else order
    return order[:count], order[count:]
