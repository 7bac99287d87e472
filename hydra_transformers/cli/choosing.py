"""`build --target`: the data and models that the arguments name, handed to `hydrate`."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from ..cost import TEXT_TOKENS
from ..data.loading import remember_max_length
from .arguments import check_can_be_learnt_from, check_named_once, check_training, device_of, read_data
from .building import change_by, check_trainable, classes_of_data, recipe_of
from .folders import check_same_processors, check_takes_files, load_config, load_processor, models_named
from .problems import CommandError


# What a target decides, with what each is where it was not given.
DECIDED = {
    "budget": None,
    "objective": None,
    "mode": "exact",
    "circuit_rows": 1_000,
    "tune": False,
    "trunk_layers": None,
    "freeze_trunk": None,
    "test_data": None,
    "test_split": None,
}


def build_for_target(arguments: argparse.Namespace) -> None:
    """One Hydra, chosen by `hydrate`."""
    from ..search import hydrate
    from ..search.sources import has_classifier

    for name, default in DECIDED.items():
        if getattr(arguments, name) != default:
            raise CommandError(
                f"--{name.replace('_', '-')} is not for --target, which decides by itself: leave one of them out"
            )
    for group in ("near", "far"):
        check_named_once([name for name, _ in getattr(arguments, group)], f"--{group}")
    check_training(arguments)
    check_takes_files(arguments.output)
    names, device = models_named([arguments.pretrained, *arguments.others]), device_of(arguments)
    configs = [load_config(name) for name in names]
    for name, config in zip(names, configs, strict=True):
        check_trainable(name, config)
    processor = load_processor(arguments.processor or names[0], configs[0])
    if arguments.processor is None:
        check_same_processors(names, configs, processor)
    is_pretrained = len(names) == 1 and not has_classifier(names[0])
    data = (_parts if is_pretrained else _held_out)(arguments, configs[0], processor)
    found = hydrate(
        names[0] if is_pretrained else names,
        ood_data=_foreign(arguments, configs[0], processor),
        target=arguments.target,
        output_dir=arguments.output,
        processor=processor,
        num_members=arguments.members,
        batch_size=arguments.batch_size,
        seed=arguments.seed,
        device=device,
        card=_card(arguments, names),
        **data,
    )
    print(f"\n{found.to_markdown()}")
    print(f"The Hydra is in {arguments.output}, the steps are in {arguments.output}-steps.")
    part = " --part test" if is_pretrained else " ..."
    print(
        f"Next, on rows that nothing was chosen by: hydra-transformers evaluate {arguments.output} --data {arguments.data}{part}"
    )


def _parts(arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any) -> dict[str, Any]:
    """For a pre-trained model: one part of the data to train on, one to choose by; that for tests is not touched."""
    remember_max_length(processor, config, arguments.max_length, TEXT_TOKENS)
    classes = classes_of_data(arguments)
    config.id2label, config.label2id = dict(enumerate(classes)), {each: at for at, each in enumerate(classes)}
    train, held_out = (
        read_data(arguments, config, processor, split=arguments.split, part=part)
        for part in ("training", "validation")
    )
    check_can_be_learnt_from(train, arguments.data, "to learn")
    recipe = recipe_of(arguments.recipe, config, train, True, arguments.epochs, arguments.max_steps)
    return {
        "train_data": replace(train, change=change_by(train, recipe)),
        "id_data": held_out,
        "class_names": classes,
        "recipe": recipe,
        "tuning_recipe": recipe_of(None, config, train, False, max_steps=arguments.max_steps),
        "training_arguments": {"report_to": arguments.report_to},
    }


def _held_out(arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any) -> dict[str, Any]:
    """For fine-tuned models: rows to choose by; nothing is trained."""
    for name in ("recipe", "epochs", "max_steps", "report_to"):
        if getattr(arguments, name) not in (None, "none"):
            raise CommandError(
                f"--{name.replace('_', '-')} is for training, and {arguments.pretrained} is fine-tuned already: leave it out"
            )
    return {"id_data": read_data(arguments, config, processor, split=arguments.split)}


def _foreign(
    arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any
) -> dict[str, dict[str, Any]] | None:
    def read(name: str, split: str | None = None) -> Any:
        prefer = ("train", "validation", "test")
        return read_data(arguments, config, processor, name, split, labelled=False, prefer=prefer)

    found = {group: {name: read(data) for name, data in getattr(arguments, group)} for group in ("near", "far")}
    if arguments.ood_data is not None:
        found["OOD"] = {Path(arguments.ood_data).name: read(arguments.ood_data, arguments.ood_split)}
    elif arguments.ood_split is not None:
        raise CommandError("--ood-split is a split of --ood-data: pass that, too")
    return {group: sets for group, sets in found.items() if sets} or None


def _card(arguments: argparse.Namespace, names: list[str]) -> dict[str, str]:
    """What the Hub calls the data and the model; folders have no name there."""
    card = {}
    if not Path(arguments.data).exists():
        card["dataset"] = arguments.data.partition(":")[0]
    if len(names) == 1 and not Path(names[0]).exists():
        card["base_model"] = names[0]
    return card
