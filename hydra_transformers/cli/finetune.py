"""`finetune`: a pre-trained model several times, or pruned members one by one."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedConfig

from ..data.image_changes import random_changes
from ..data.loading import PreparedData, classes_in, remember_max_length
from ..data.processors import load_processor
from ..data.rows import SPLITS_TO_CUT
from ..fusion import saved_tower_configs
from ..fusion.probe import TEXT_TOKENS
from ..hub.member_heads import copy_circuits
from ..models.auto import CLASSIFIERS, is_zero_shot
from ..training import RECIPES, Recipe, finetune_from_pretrained, finetune_members
from ..training.recipes import base_recipe, recipe_for
from .errors import access_to
from .folders import are_fine_tunings, claim_for_training, load_config, load_model, members_in
from .options import (
    BatchSize,
    DataOptions,
    Epochs,
    MaxSteps,
    PartOptions,
    ReportTo,
    Seed,
    check_named_once,
    choice,
    learning_rate,
    option,
)
from .rows import check_can_be_learnt_from, overlap


MOST_VALIDATION_ROWS = 3_000
VALIDATES_ON_FIRST_ROWS = {"sst2"}
RecipeName = Annotated[
    choice(sorted(RECIPES)) | None,
    option(
        "how to train (default: as finetune-images or finetune-texts from a pre-trained model, otherwise as tune-images or "
        "tune-texts, with epochs by the number of rows and an early end; imagenet1k, cifar100 and sst2 are the paper's)"
    ),
]


def finetune(
    model: Annotated[
        str,
        typer.Argument(
            metavar="DIR_OR_MODEL",
            help="the output of `prune`; or a pre-trained model, by folder or Hub name, which is fine-tuned several times, each "
            "time with a new classifier for the classes of the data",
        ),
    ],
    data: PartOptions,
    output: Annotated[Path, option("gets the trained members; run again to go on after a stop", "DIR")],
    recipe: RecipeName = None,
    members: Annotated[
        int | None, option("how many fine-tunings of a pre-trained model (default: 3)", "M", min=1)
    ] = None,
    validation_split: Annotated[
        str | None,
        option(
            "default: with --part training the part for validation; otherwise a tenth of the training rows, at most 3,000, is "
            "held out, drawn at random; with the recipe sst2 the first rows are"
        ),
    ] = None,
    learning_rates: Annotated[
        list[Any] | None,
        option('to choose from by validation, or "grid" for the recipe\'s', "LR...", parser=learning_rate),
    ] = None,
    epochs: Epochs = None,
    max_steps: MaxSteps = None,
    report_to: ReportTo = "none",
    trunk_layers: Annotated[
        int,
        option("do not train the first N layers, nor the embeddings: fused members run them once", "N", min=0),
    ] = 0,
    seed: Seed = 0,
    batch_size: BatchSize = 32,
) -> None:
    """Fine-tune a pre-trained model several times, or pruned members one by one."""
    check_training(epochs, max_steps, report_to)
    if data.part not in (None, "training"):
        raise ValueError(f"--part {data.part} is held out from training: pass --part training, or leave it out")
    source = Path(model)
    is_pretrained = not source.is_dir() or (source / "config.json").exists()
    if not is_pretrained and members is not None:
        raise ValueError(f"--members is for a pre-trained model, {model} holds its members: leave it out")
    folders = [] if is_pretrained else members_in(source)
    name = model if is_pretrained else str(folders[0])
    config = load_config(name)
    check_trainable(model, config, is_pretrained)
    check_trunk(trunk_layers, name, config)
    named = RECIPES[recipe or base_recipe(config, is_pretrained)]
    rates = _learning_rates(learning_rates or None, named)
    count = (members or 3) if is_pretrained else len(folders)
    claim_for_training(output, source, count, is_pretrained or are_fine_tunings(source))
    processor = load_processor(data.processor or name, config)
    remember_max_length(processor, config, data.max_length, TEXT_TOKENS)
    classes = None
    if is_pretrained:
        classes = classes_of(data, data.part)
        config.id2label, config.label2id = dict(enumerate(classes)), {each: at for at, each in enumerate(classes)}
        print(f"{count} fine-tunings of {name} with new classifiers for {len(classes)} classes")
    train, validation = _train_and_validation(data, validation_split, seed, config, processor, named)
    chosen = recipe_for(recipe, config, train, is_pretrained, epochs, max_steps)
    chosen = replace(chosen, trunk_layers=trunk_layers)
    settings = {
        "seed": seed,
        "learning_rates": rates,
        "per_device_train_batch_size": batch_size,
        "per_device_eval_batch_size": batch_size,
        "report_to": report_to,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    if is_pretrained:
        finetune_from_pretrained(name, count, chosen, train, validation, output, class_names=classes, **settings)
    else:
        copy_circuits(source, output)
        models = [load_model(str(folder)) for folder in folders]
        finetune_members(models, chosen, train, validation, output, **settings)
    for index in range(count):
        processor.save_pretrained(output / f"member-{index}")
    step = "prune" if is_pretrained else "fuse"
    print(f"Next: hydra-transformers {step} {output} {'--data ... ' if is_pretrained else ''}--output ...")
    if is_pretrained:
        print("(Or hydra-transformers fuse: fine-tunings make a Hydra without any pruning, too.)")


def check_training(epochs: int | None, max_steps: int | None, report_to: str) -> None:
    """Refuses two lengths of a training, and reports to what is not installed."""
    from transformers.integrations import get_available_reporting_integrations

    if epochs is not None and max_steps is not None:
        raise ValueError("--epochs and --max-steps are both lengths of a training: pass one of them")
    known = get_available_reporting_integrations()
    if report_to not in ("none", "all", *known):
        raise ValueError(
            f"--report-to {report_to} is unknown or not installed: install it, or pass one of {', '.join(['none', *known])}"
        )


def check_trainable(name: str, config: PreTrainedConfig, is_pretrained: bool = True) -> None:
    """Refuses what has no classifier to train. A pre-trained model of two towers gets one: its config is then that of an image
    classifier."""
    if is_zero_shot(config):
        if not is_pretrained:
            raise ValueError(
                f"{name} has two towers and no classifier to train, members of it are fused as they are: go on with `fuse`"
            )
        if config.model_type in CLASSIFIERS:
            config.architectures = [CLASSIFIERS[config.model_type].__name__]
    if is_pretrained and hasattr(config, "kept_heads"):
        raise ValueError(f"{name} is a single Hydra: pass a pre-trained model of Transformers, or a folder of members")


def check_trunk(trunk_layers: int | None, name: str, config: PreTrainedConfig) -> None:
    """Refuses more layers than a model, or one of its towers, has."""
    layers = min(each.num_hidden_layers for each in saved_tower_configs(config).values())
    if trunk_layers is not None and trunk_layers > layers:
        raise ValueError(f"--trunk-layers is {trunk_layers}, {name} has {layers} layers: pass 0 to {layers}")


def classes_of(data: DataOptions, part: str | None = None) -> list[str]:
    with access_to(data.data, "data set"):
        split = data.split or (SPLITS_TO_CUT if part is None else None)
        return classes_in(data.source(split=split, part=part))


def _train_and_validation(
    data: PartOptions,
    validation_split: str | None,
    seed: int,
    config: PreTrainedConfig,
    processor: Any,
    recipe: Recipe,
) -> tuple[Any, Any]:
    rows = data.read(config, processor, split=data.split, prefer=("train",), part=data.part)
    check_can_be_learnt_from(rows, data.data, "to learn")
    changed = replace(rows, change=change_by(rows, recipe))
    if validation_split is not None:
        validation = data.read(config, processor, split=validation_split)
        if overlap(rows.split, validation.split):
            raise ValueError(
                f"--validation-split {validation.split} has rows of the training split {rows.split}: pass another, or leave it "
                "out to hold out a part"
            )
        return changed, validation
    if data.part is not None:
        validation = data.read(config, processor, split=data.split, part="validation", quiet=True)
        train = changed
    else:
        held_out, others = _held_out(len(rows), seed, recipe.name in VALIDATES_ON_FIRST_ROWS)
        train, validation = torch.utils.data.Subset(changed, others), torch.utils.data.Subset(rows, held_out)
    print(f"{len(train):,} rows to train, {len(validation):,} held out for validation")
    return train, validation


def change_by(rows: PreparedData, recipe: Recipe) -> Callable[[Any], Any] | None:
    """The recipe's random changes of training images; says what is left out."""
    if rows.kind != "image":
        return None
    change, unknown = random_changes(recipe.train_transforms)
    if unknown:
        print(f"the recipe's {', '.join(unknown)} is not known here and left out")
    return change


def _held_out(rows: int, seed: int, takes_first: bool) -> tuple[Sequence[int], Sequence[int]]:
    """A tenth of the rows, the first of them or random ones, and the others."""
    count = min(MOST_VALIDATION_ROWS, max(1, rows // 10))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    order = range(rows) if takes_first else order
    return order[:count], order[count:]


def _learning_rates(rates: list[float | str] | None, recipe: Recipe) -> str | list[float] | None:
    if rates is None:
        return None
    check_named_once(rates, "--learning-rates")
    if rates == ["grid"]:
        if not recipe.learning_rate_grid:
            raise ValueError(f"the recipe {recipe.name} has no grid of learning rates: pass numbers")
        return "grid"
    if "grid" in rates:
        raise ValueError("--learning-rates has numbers and the word grid: pass either")
    return rates
