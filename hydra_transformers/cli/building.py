"""`prune`, `finetune` and `fuse`: from a backbone, or several fine-tunings, to members to a Hydra."""

import argparse
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .._io.files import write_atomically, written_whole
from ..cost import TEXT_TOKENS
from ..data.fingerprints import fingerprint_of_weights
from ..data.image_changes import random_changes
from ..data.loading import PreparedData, classes_in, remember_max_length
from ..data.rows import SPLITS_TO_CUT, is_same_source
from ..fusion import check_can_be_fused, saved_tower_configs
from ..models.auto import CLASSIFIERS, AutoHydra, is_zero_shot
from ..pruning import Circuit, draw_members, extract_circuit
from ..pruning.scoring import OBJECTIVES
from ..training import RECIPES, Recipe, default_recipe, finetune_from_pretrained, finetune_members
from ..training.default_recipe import base_recipe
from .arguments import (
    check_can_be_learnt_from,
    check_named_once,
    check_training,
    class_prompts,
    device_of,
    read_data,
    source_of,
)
from .folders import (
    CIRCUITS,
    FUSE_SETTINGS,
    PRUNE_SETTINGS,
    are_fine_tunings,
    check_is_new,
    check_same_processors,
    check_takes_files,
    circuits_of,
    claim,
    claim_for_training,
    copy_circuits,
    digest_of_names,
    load_config,
    load_model,
    load_processor,
    members_in,
    models_named,
)
from .problems import CommandError, access_to


CALIBRATION_SPLITS = ("train", "validation", "test")
MOST_VALIDATION_ROWS = 3_000
VALIDATES_ON_FIRST_ROWS = {"sst2"}


# prune


def prune(arguments: argparse.Namespace) -> None:
    names = models_named(arguments.models)
    objectives = objectives_of(arguments, len(names))
    members = len(names) if len(names) > 1 else arguments.members or (len(objectives) if len(objectives) > 1 else 3)
    device = device_of(arguments)
    configs = [load_config(name) for name in names]
    for name, config in zip(names, configs, strict=True):
        check_heads(arguments, name, config, objectives, members, is_one_of_several=len(names) > 1)
    claim(arguments.output, PRUNE_SETTINGS, _settings(arguments, names, objectives, members))
    if all((arguments.output / f"member-{index}" / "config.json").exists() for index in range(members)):
        print(f"{arguments.output} is finished already.")
        return
    models, config = [load_model(name, device) for name in names], configs[0]
    if len(models) > 1:
        check_can_be_fused(models, "MODEL")
        if arguments.method == "circuits" and not arguments.allow_equal:
            _refuse_equal(models, names, "pass different fine-tunings")  # before it takes long to find equal circuits
    processor = load_processor(arguments.processor or names[0], config)
    if arguments.processor is None:
        check_same_processors(names, configs, processor)
    data = read_data(
        arguments, config, processor, split=arguments.split, prefer=CALIBRATION_SPLITS, part=arguments.part
    )
    check_can_be_learnt_from(data, arguments.data, "to choose heads by", by_classes=objectives != ["ood"])
    unknown = _unknown_data(arguments, config, processor, data)
    prompts = class_prompts(config, processor, data)
    if arguments.method == "taylor":
        pruned = _taylor_members(arguments, models, data, members, prompts)
    elif len(models) > 1:
        pruned = _members_of_several(arguments, models, data, unknown, objectives[0], prompts)
    else:
        pruned = _circuit_members(arguments, models[0], data, unknown, objectives, members, prompts)
    for index, member in enumerate(pruned):
        _save_member(arguments.output / f"member-{index}", member, processor)
    for checkpoint in (arguments.output / CIRCUITS).glob("*.checkpoint"):
        checkpoint.unlink()
    kept = ", ".join(str(_num_heads(member.config)) for member in pruned)
    print(f"{len(pruned)} members with {kept} of {_num_heads(config)} heads are in {arguments.output}.")
    print(f"Next: hydra-transformers finetune {arguments.output} --data ... --output ...")
    print(
        "(Or, with a tenth to a sixth of the heads gone, hydra-transformers fuse: few lost heads may need no training.)"
    )


def _unknown_data(arguments, config: PreTrainedConfig, processor: Any, data: Any) -> Any:
    """The out-of-distribution data, where the arguments name some."""
    if arguments.ood_data is None:
        return None
    ood = (arguments.ood_data, arguments.ood_split)
    unknown = read_data(arguments, config, processor, *ood, labelled=False, prefer=CALIBRATION_SPLITS)
    if is_same_source(arguments.data, arguments.ood_data) and data.split == unknown.split:
        raise CommandError(
            f"--ood-data {arguments.ood_data} is the data itself, which cannot be out of its own distribution: pass other "
            "data, or another --ood-split of it"
        )
    if len(unknown) < 2:
        raise CommandError(f"{arguments.ood_data} gives 1 row, too few to tell it from the data by: read more of it")
    return unknown


def _settings(arguments: argparse.Namespace, models: list[str], objectives: list[str], members: int) -> dict[str, Any]:
    """What the members depend on: a folder made with other settings is another step's."""
    names = ("method", "data", "split", "part", "ood_data", "ood_split", "limit", "budget", "heads_per_layer")
    names += (
        "out_of",
        "mode",
        "seed",
        "image_column",
        "audio_column",
        "text_column",
        "label_column",
        "labels_in_order",
        "processor",
    )
    settings = {"model": models[0] if len(models) == 1 else models}
    settings |= {name: getattr(arguments, name) for name in names}
    settings |= {"objectives": objectives, "members": members}
    # None where they were not known yet.
    settings |= {"score": None if arguments.score == "msp" else arguments.score, "max_length": arguments.max_length}
    return settings | {"trunk_layers": arguments.trunk_layers or None}


def objectives_of(arguments: argparse.Namespace, models: int) -> list[str]:
    """What circuits are extracted for; refuses arguments that do not go together."""
    if models > 1 and arguments.members not in (None, models):
        raise CommandError(f"--members is {arguments.members}, and {models} models make one each: leave it out")
    if arguments.method == "taylor":
        for name in ("budget", "objectives", "out_of", "ood_data", "ood_split"):
            if getattr(arguments, name) is not None:
                raise CommandError(f"--{name.replace('_', '-')} is for --method circuits: leave it out")
        if arguments.mode != "exact":
            raise CommandError(f"--mode {arguments.mode} is for --method circuits: leave it out")
        if arguments.score != "msp":
            raise CommandError(f"--score {arguments.score} is for --method circuits: leave it out")
        return []
    check_named_once(arguments.objectives or [], "--objectives")
    if arguments.heads_per_layer is not None:
        raise CommandError("--heads-per-layer is for --method taylor: pass --budget, the heads each member loses")
    objectives = arguments.objectives or (list(OBJECTIVES) if arguments.ood_data else ["acc"])
    if models > 1:
        objectives = arguments.objectives or (["avg"] if arguments.ood_data else ["acc"])
        if len(objectives) > 1:
            raise CommandError(
                f"--objectives has {len(objectives)}, and each of the {models} models gets one circuit: name one"
            )
        if arguments.out_of is not None:
            raise CommandError(
                "--out-of is for members sampled from one circuit, here each model has its own: leave it out"
            )
    elif arguments.objectives is None and arguments.members not in (None, len(objectives)):
        objectives = objectives[-1:]
    if len(objectives) > 1 and arguments.members not in (None, len(objectives)):
        raise CommandError(f"{len(objectives)} objectives make {len(objectives)} members, not {arguments.members}")
    if len(objectives) > 1 and arguments.out_of is not None:
        raise CommandError(f"--out-of is for a single objective, here are {len(objectives)}: leave it out")
    needy = [objective for objective in objectives if objective != "acc"]
    if needy and arguments.ood_data is None:
        raise CommandError(f"the objective {needy[0]} needs out-of-distribution data: pass --ood-data")
    if arguments.ood_data is not None and not needy:
        raise CommandError("--ood-data is for the objectives ood and avg: leave it out, or name one of them")
    if arguments.score != "msp" and not needy:
        raise CommandError(
            f"--score {arguments.score} is for the objectives ood and avg: leave it out, or name one of them"
        )
    if arguments.ood_split is not None and arguments.ood_data is None:
        raise CommandError("--ood-split is a split of --ood-data: pass that, too")
    return objectives


def check_heads(
    arguments: argparse.Namespace,
    name: str,
    config: PreTrainedConfig,
    objectives: list[str],
    members: int,
    is_one_of_several: bool,
) -> None:
    """Refuses numbers that the model's heads do not allow."""
    if getattr(config, "num_members", 1) > 1:
        raise CommandError(f"{name} is a Hydra of {config.num_members} members: pass the backbone, or one member")
    layers = min(each.num_hidden_layers for each in saved_tower_configs(config).values())
    if arguments.trunk_layers >= layers:
        raise CommandError(
            f"--trunk-layers is {arguments.trunk_layers}, {name} has {layers} layers: pass 0 to {layers - 1}, or there is "
            "nothing to prune"
        )
    if arguments.method == "taylor":
        most = _most_heads_in_a_layer(config, arguments.trunk_layers)
        if _heads_per_layer(arguments, config) >= most:
            raise CommandError(
                f"--heads-per-layer is {_heads_per_layer(arguments, config)}, of at most {most} heads in a layer: that cuts "
                + (f"nothing, pass 1 to {most - 1}" if most > 1 else "nothing, and there is none to spare")
            )
        return
    if arguments.budget == "best" and len(objectives) == 1 and not is_one_of_several:
        raise CommandError(
            "--budget best is for members with a circuit each: pass several --objectives or several models, or a number"
        )
    every = _num_heads(config, arguments.trunk_layers)
    budget, out_of = _budget(arguments, config), _out_of(arguments, config, objectives, members)
    if not 1 <= budget < every:
        raise CommandError(f"--budget is {budget}: {every} heads compete, so pass 1 to {every - 1}")
    if is_one_of_several:
        return
    if not budget <= out_of < every:
        raise CommandError(
            f"--out-of is {out_of}: a member loses {budget} of them, and {every} heads compete, so pass {budget} to {every - 1}"
        )
    if len(objectives) == 1 and math.comb(out_of, budget) < members and not arguments.allow_equal:
        raise CommandError(
            f"there are only {math.comb(out_of, budget)} ways to lose {budget} of {out_of} heads, for {members} members: pass "
            "another --budget or --out-of, or fewer --members"
        )


def _heads_per_layer(arguments: argparse.Namespace, config: PreTrainedConfig) -> int:
    return arguments.heads_per_layer or max(1, round(_most_heads_in_a_layer(config, arguments.trunk_layers) * 2 / 3))


def _most_heads_in_a_layer(config: PreTrainedConfig, trunk_layers: int) -> int:
    """Behind the trunk, in the tower that Taylor pruning looks at, of two that of images."""
    tower = next(iter(saved_tower_configs(config).values()))
    if hasattr(tower, "kept_heads"):
        return max(len(layer[0]) for layer in tower.kept_heads[trunk_layers:])
    return tower.num_attention_heads


def _budget(arguments: argparse.Namespace, config: PreTrainedConfig) -> int:
    """How many heads a member loses at most."""
    if arguments.budget == "best":
        return max(1, _num_heads(config, arguments.trunk_layers) // 3)
    return arguments.budget or max(1, _num_heads(config, arguments.trunk_layers) // 6)


def _drawn(arguments: argparse.Namespace, config: PreTrainedConfig) -> int | str:
    """How many heads each member loses, as `draw_members` takes it."""
    return "best" if arguments.budget == "best" else _budget(arguments, config)


def _out_of(arguments: argparse.Namespace, config: PreTrainedConfig, objectives: list[str], members: int) -> int:
    """How many heads a circuit ranks: those to sample from where it is the only one, otherwise the budget."""
    budget = _budget(arguments, config)
    if len(objectives) > 1:
        return budget
    enough = max(2 * budget, budget + members - 1)  # so that members can differ
    return arguments.out_of or max(budget, min(enough, _num_heads(config, arguments.trunk_layers) - 1))


def _taylor_members(arguments, models: list[PreTrainedModel], data: Any, members: int, prompts: dict | None) -> list:
    keep = _heads_per_layer(arguments, models[0].config)
    loader = torch.utils.data.DataLoader(data, arguments.batch_size)
    return draw_members(
        models if len(models) > 1 else models[0],
        dataloader=loader,
        heads_per_layer=keep,
        num_members=members,
        seed=arguments.seed,
        class_prompts=prompts,
        trunk_layers=arguments.trunk_layers,
        allow_equal=arguments.allow_equal,
    )


def _members_of_several(arguments, models: list[PreTrainedModel], data, unknown, objective: str, prompts) -> list:
    """Each model without the first heads of its own circuit."""
    budget, folder = _budget(arguments, models[0].config), arguments.output / CIRCUITS
    circuits = extract_circuit(
        models,
        data,
        unknown,
        objective,
        budget=budget,
        class_prompts=prompts,
        trunk_layers=arguments.trunk_layers,
        mode=arguments.mode,
        batch_size=arguments.batch_size,
        checkpoint=[folder / f"member-{index}.checkpoint" for index in range(len(models))],
    )
    for index, circuit in enumerate(circuits):
        circuit.save(folder / f"member-{index}.json")
        _tell(circuit, f"circuit of member {index} for {objective}")
    lost = _drawn(arguments, models[0].config)
    return draw_members(models, circuits=circuits, budget=lost, allow_equal=arguments.allow_equal)


def _tell(circuit: Circuit, name: str) -> None:
    print(
        f"{name}: score {circuit.dense_score:.4f} with all heads, {circuit.scores[-1]:.4f} without "
        f"{len(circuit.ranking)}, best without {circuit.best_budget}",
        flush=True,
    )


def _circuit_members(arguments, model, data, unknown, objectives: list[str], members: int, prompts) -> list:
    budget, out_of = _budget(arguments, model.config), _out_of(arguments, model.config, objectives, members)
    circuits = []
    for objective in objectives:
        circuit = extract_circuit(
            model,
            data,
            unknown,
            objective,
            budget=out_of,
            score=arguments.score,
            class_prompts=prompts,
            trunk_layers=arguments.trunk_layers,
            mode=arguments.mode,
            batch_size=arguments.batch_size,
            checkpoint=arguments.output / CIRCUITS / f"{objective}.checkpoint",
        )
        circuit.save(arguments.output / CIRCUITS / f"{objective}.json")
        _tell(circuit, f"circuit for {objective}")
        circuits.append(circuit)
    if len(circuits) > 1:
        lost = _drawn(arguments, model.config)
        return draw_members(model, circuits=circuits, budget=lost, allow_equal=arguments.allow_equal)
    return draw_members(
        model,
        circuit=circuits[0],
        budget=budget,
        out_of=out_of,
        num_members=members,
        seed=arguments.seed,
        allow_equal=arguments.allow_equal,
    )


def _num_heads(config: PreTrainedConfig, trunk_layers: int = 0) -> int:
    """How many heads a backbone or a member has, in all layers of all towers behind the first `trunk_layers`."""
    towers = saved_tower_configs(config).values()
    if all(hasattr(config, "kept_heads") for config in towers):
        return sum(len(layer[0]) for config in towers for layer in config.kept_heads[trunk_layers:])
    return sum((config.num_hidden_layers - trunk_layers) * config.num_attention_heads for config in towers)


def _save_member(folder: Path, member: PreTrainedModel, processor: Any) -> None:
    with written_whole(folder) as unfinished:
        member.save_pretrained(unfinished)
        processor.save_pretrained(unfinished)


# finetune


def finetune(arguments: argparse.Namespace) -> None:
    source = Path(arguments.model)
    is_pretrained = not source.is_dir() or (source / "config.json").exists()
    folders = [] if is_pretrained else members_in(source)
    name = arguments.model if is_pretrained else str(folders[0])
    config = load_config(name)
    check_trainable(arguments.model, config, is_pretrained)
    check_trunk(arguments.trunk_layers, name, config)
    _check_finetuning(arguments, is_pretrained)
    named = RECIPES[arguments.recipe or base_recipe(config, is_pretrained)]
    learning_rates = _learning_rates(arguments.learning_rates, named)
    members = (arguments.members or 3) if is_pretrained else len(folders)
    is_several = is_pretrained or are_fine_tunings(source)
    claim_for_training(arguments.output, source, members, is_several)
    processor = load_processor(arguments.processor or name, config)
    remember_max_length(processor, config, arguments.max_length, TEXT_TOKENS)
    classes = None
    if is_pretrained:
        classes = classes_of_data(arguments)
        config.id2label, config.label2id = dict(enumerate(classes)), {each: at for at, each in enumerate(classes)}
        print(f"{members} fine-tunings of {name} with new classifiers for {len(classes)} classes")
    train, validation = _train_and_validation(arguments, config, processor, named)
    recipe = recipe_of(arguments.recipe, config, train, is_pretrained, arguments.epochs, arguments.max_steps)
    recipe = replace(recipe, trunk_layers=arguments.trunk_layers)
    settings = {
        "seed": arguments.seed,
        "learning_rates": learning_rates,
        "per_device_train_batch_size": arguments.batch_size,
        "per_device_eval_batch_size": arguments.batch_size,
        "report_to": arguments.report_to,
        "dataloader_pin_memory": torch.cuda.is_available(),
    }
    if is_pretrained:
        finetune_from_pretrained(
            name, members, recipe, train, validation, arguments.output, class_names=classes, **settings
        )
    else:
        copy_circuits(source, arguments.output)
        models = [load_model(str(folder)) for folder in folders]
        finetune_members(models, recipe, train, validation, arguments.output, **settings)
    for index in range(members):
        processor.save_pretrained(arguments.output / f"member-{index}")
    step = "prune" if is_pretrained else "fuse"
    print(f"Next: hydra-transformers {step} {arguments.output} {'--data ... ' if is_pretrained else ''}--output ...")
    if is_pretrained:
        print("(Or hydra-transformers fuse: fine-tunings make a Hydra without any pruning, too.)")


def check_trainable(name: str, config: PreTrainedConfig, is_pretrained: bool = True) -> None:
    """Refuses what has no classifier to train. A pre-trained model of two towers gets one: its config is then that of an image
    classifier."""
    if is_zero_shot(config):
        if not is_pretrained:
            raise CommandError(
                f"{name} has two towers and no classifier to train, members of it are fused as they are: go on with `fuse`"
            )
        if config.model_type in CLASSIFIERS:
            config.architectures = [CLASSIFIERS[config.model_type].__name__]
    if is_pretrained and hasattr(config, "kept_heads"):
        raise CommandError(
            f"{name} is a single Hydra: pass a pre-trained model of Transformers, or a folder of members"
        )


def check_trunk(trunk_layers: int | None, name: str, config: PreTrainedConfig) -> None:
    """Refuses more layers than a model, or one of its towers, has."""
    layers = min(each.num_hidden_layers for each in saved_tower_configs(config).values())
    if trunk_layers is not None and trunk_layers > layers:
        raise CommandError(f"--trunk-layers is {trunk_layers}, {name} has {layers} layers: pass 0 to {layers}")


def _check_finetuning(arguments: argparse.Namespace, is_pretrained: bool) -> None:
    check_training(arguments)
    if not is_pretrained and arguments.members is not None:
        raise CommandError(f"--members is for a pre-trained model, {arguments.model} holds its members: leave it out")
    if arguments.part not in (None, "training"):
        raise CommandError(f"--part {arguments.part} is held out from training: pass --part training, or leave it out")


def classes_of_data(arguments: argparse.Namespace) -> list[str]:
    with access_to(arguments.data, "data set"):
        split = arguments.split or (SPLITS_TO_CUT if arguments.part is None else None)
        return classes_in(source_of(arguments, split=split, part=arguments.part))


def _train_and_validation(
    arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any, recipe: Recipe
) -> tuple[Any, Any]:
    rows = read_data(arguments, config, processor, split=arguments.split, prefer=("train",), part=arguments.part)
    check_can_be_learnt_from(rows, arguments.data, "to learn")
    changed = replace(rows, change=change_by(rows, recipe))
    if arguments.validation_split is not None:
        validation = read_data(arguments, config, processor, split=arguments.validation_split)
        if overlap(rows.split, validation.split):
            raise CommandError(
                f"--validation-split {validation.split} has rows of the training split {rows.split}: pass another, or leave it "
                "out to hold out a part"
            )
        return changed, validation
    if arguments.part is not None:
        validation = read_data(arguments, config, processor, split=arguments.split, is_told=False, part="validation")
        train = changed
    else:
        held_out, others = _held_out(len(rows), arguments.seed, recipe.name in VALIDATES_ON_FIRST_ROWS)
        train, validation = torch.utils.data.Subset(changed, others), torch.utils.data.Subset(rows, held_out)
    print(f"{len(train):,} rows to train, {len(validation):,} held out for validation")
    return train, validation


def change_by(rows: PreparedData, recipe: Recipe) -> Callable[[Any], Any] | None:
    """What training images go through by the recipe; says what is left out."""
    if rows.kind != "image":
        return None
    change, unknown = random_changes(recipe.train_transforms)
    if unknown:
        print(f"the recipe's {', '.join(unknown)} is not known here and left out")
    return change


def overlap(split: str | None, other: str | None) -> bool:
    """Whether two splits surely have rows in common: they are the same, or one is a part of the other."""
    if split is None or other is None:  # the only one
        return split == other
    is_of_same = split.partition("[")[0] == other.partition("[")[0]
    return is_of_same and (split == other or "[" not in split or "[" not in other)


def recipe_of(
    name: str | None,
    config: PreTrainedConfig,
    train: Any,
    is_pretrained: bool,
    epochs: int | None = None,
    max_steps: int | None = None,
) -> Recipe:
    """The recipe of that name, by default the one that fits the data, with another length where one is given; then the
    warm-up keeps its share."""
    if name is None:
        recipe = default_recipe(config, train, is_pretrained, epochs)
        return recipe if max_steps is None else replace(recipe, max_steps=max_steps, epochs=None)
    recipe = RECIPES[name]
    if epochs is None and max_steps is None:
        return recipe
    warmup = recipe.warmup_steps if recipe.warmup_steps < 1 else recipe.warmup_steps / recipe.max_steps
    return replace(recipe, max_steps=max_steps, epochs=epochs, warmup_steps=warmup)


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
            raise CommandError(f"the recipe {recipe.name} has no grid of learning rates: pass numbers")
        return "grid"
    if "grid" in rates:
        raise CommandError("--learning-rates has numbers and the word grid: pass either")
    return rates


# fuse


def fuse(arguments: argparse.Namespace) -> None:
    from ..hub.kept_heads_map import trunk_sentence

    folder = Path(arguments.members[0]) if len(arguments.members) == 1 else None
    names = arguments.members if folder is None else [str(path) for path in members_in(folder)]
    check_is_new(arguments.output)
    check_takes_files(arguments.output)
    configs = [load_config(name) for name in names]
    if folder is not None:
        circuits_of(folder, configs)  # refuses those that a card could not be made of
    processor = load_processor(arguments.processor or names[0], configs[0])
    if arguments.processor is None:
        check_same_processors(names, configs, processor)
    check_trunk(arguments.trunk_layers, names[0], configs[0])
    members = [load_model(name) for name in names]
    check_can_be_fused(members, "members")
    if not arguments.allow_equal:
        _refuse_equal(members, names, "prune with another --budget or other data")
    with written_whole(arguments.output) as unfinished:
        hydra = AutoHydra.from_pruned_members(members, arguments.shared, arguments.trunk_layers)
        hydra.save_pretrained(unfinished)
        processor.save_pretrained(unfinished)
        record = {"made_of": digest_of_names(names), "fine_tunings": _are_fine_tunings(folder, names, configs)}
        write_atomically(unfinished / FUSE_SETTINGS, json.dumps(record, indent=1) + "\n")
        if folder is not None:
            copy_circuits(folder, unfinished)
    once = trunk_sentence(hydra.config)
    print(f"{hydra.num_members} members are one model in {arguments.output}{f'; {once}' if once else ''}.")
    print(f"Next: hydra-transformers evaluate {arguments.output} --data ...")


def _are_fine_tunings(folder: Path | None, names: list[str], configs: list[PreTrainedConfig]) -> bool:
    """Whether members are fine-tunings and no copies of one backbone: they say so, or nothing was cut out of any."""
    folders = [folder] if folder is not None else [Path(name).parent for name in names]
    is_plain = not any(hasattr(config, "kept_heads") for config in configs)
    return is_plain or any(are_fine_tunings(each) for each in folders)


def _refuse_equal(members: list[PreTrainedModel], names: list[str], instead: str) -> None:
    """Members of equal weights agree on everything, so that the Hydra would be one model at the price of several."""
    first: dict[str, str] = {}
    for place, (member, name) in enumerate(zip(members, names, strict=True)):
        called = Path(name).name or name
        equal = first.setdefault(fingerprint_of_weights(member), called)
        if len(first) <= place:
            raise CommandError(
                f"{equal} and {called} have the same heads and weights and would agree on everything: {instead}, or pass "
                "--allow-equal"
            )
