"""`prune`, `finetune` and `fuse`: from a backbone to members to a Hydra."""

import argparse
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..files import written_whole
from ..fingerprints import fingerprint_of_weights
from ..models.configuration_hydra import SHARED_PARTS
from ..models.fusion import tower_configs
from ..pruning import draw_members, extract_circuit
from ..pruning.scoring import OBJECTIVES, OOD_SCORES
from ..training import RECIPES, Recipe, finetune_members
from .arguments import (
    add_batch_size,
    add_data,
    add_device,
    add_output,
    check_can_be_learnt_from,
    check_named_once,
    class_prompts,
    device_of,
    learning_rate,
    positive,
    read_data,
    seed,
)
from .data import is_same_source
from .folders import (
    CIRCUITS,
    PRUNE_SETTINGS,
    check_is_new,
    check_takes_files,
    circuits_of,
    claim,
    claim_for_training,
    copy_circuits,
    load_config,
    load_model,
    load_processor,
    members_in,
)
from .problems import CommandError


CALIBRATION_SPLITS = ("train", "validation", "test")
MOST_VALIDATION_ROWS = 3_000
VALIDATES_ON_FIRST_ROWS = {"sst2"}


# prune


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="an image or text classifier or a CLIP model: Hub name or folder"
    )
    parser.add_argument("--method", choices=("taylor", "circuits"), default="circuits", help="default: %(default)s")
    parser.add_argument("--members", type=positive, default=None, metavar="M", help="how many members (default: 3)")
    parser.add_argument(
        "--budget", type=positive, metavar="N", help="circuits: heads each member loses (default: a third of all)"
    )
    parser.add_argument(
        "--heads-per-layer", type=positive, metavar="N", help="taylor: heads each layer keeps (default: two thirds)"
    )
    parser.add_argument(
        "--objectives",
        nargs="+",
        choices=OBJECTIVES,
        help="circuits: what a circuit is extracted for, one member each; with a single one, members are sampled from its "
        "ranking (default: acc ood avg with --ood-data, otherwise acc)",
    )
    parser.add_argument(
        "--out-of",
        type=positive,
        metavar="N",
        help="circuits, with a single objective: the first N heads of its ranking are those to sample from (default: twice "
        "the budget)",
    )
    parser.add_argument("--mode", choices=("exact", "shortlist"), default="exact", help="default: %(default)s")
    parser.add_argument("--ood-data", metavar="NAME_OR_FOLDER", help="out-of-distribution data for ood and avg")
    parser.add_argument("--ood-split", help="default: train, validation or test, whichever comes first")
    parser.add_argument(
        "--score",
        choices=OOD_SCORES,
        default="msp",
        help="circuits for ood and avg: the OOD score, best the one that will be used (default: %(default)s)",
    )
    parser.add_argument("--seed", type=seed, default=0, help="default: %(default)s")
    parser.add_argument(
        "--allow-equal", action="store_true", help="take members that lose the same heads, to be trained apart"
    )
    add_batch_size(parser, 32)
    add_device(parser)
    add_data(parser, "train")
    add_output(parser, "gets member-0, member-1, ... and the circuits; run again to go on after a stop")


def prune(arguments: argparse.Namespace) -> None:
    objectives = _objectives(arguments)
    members = arguments.members or (len(objectives) if len(objectives) > 1 else 3)
    device = device_of(arguments)
    config = load_config(arguments.model)
    _check_heads(arguments, config, objectives, members)
    claim(arguments.output, PRUNE_SETTINGS, _settings(arguments, objectives, members))
    if all((arguments.output / f"member-{index}" / "config.json").exists() for index in range(members)):
        print(f"{arguments.output} is finished already.")
        return
    model = load_model(arguments.model, device)
    processor = load_processor(arguments.processor or arguments.model, config)
    data = read_data(arguments, config, processor, split=arguments.split, prefer=CALIBRATION_SPLITS)
    check_can_be_learnt_from(data, arguments.data, "to choose heads by", by_classes=objectives != ["ood"])
    unknown = _unknown_data(arguments, config, processor, data)
    prompts = class_prompts(config, processor, data)
    if arguments.method == "taylor":
        pruned = _taylor_members(arguments, model, data, members, prompts)
    else:
        pruned = _circuit_members(arguments, model, data, unknown, objectives, members, prompts)
    for index, member in enumerate(pruned):
        _save_member(arguments.output / f"member-{index}", member, processor)
    for checkpoint in (arguments.output / CIRCUITS).glob("*.checkpoint"):
        checkpoint.unlink()
    kept = ", ".join(str(_num_heads(member.config)) for member in pruned)
    print(f"{len(pruned)} members with {kept} of {_num_heads(config)} heads are in {arguments.output}.")
    print(f"Next: hydra-transformers finetune {arguments.output} --recipe ... --data ... --output ...")
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


def _settings(arguments: argparse.Namespace, objectives: list[str], members: int) -> dict[str, Any]:
    """What the members depend on: a folder made with other settings is another step's."""
    names = ("model", "method", "data", "split", "ood_data", "ood_split", "limit", "budget", "heads_per_layer")
    names += ("out_of", "mode", "seed", "image_column", "text_column", "label_column", "labels_in_order", "processor")
    settings = {name: getattr(arguments, name) for name in names} | {"objectives": objectives, "members": members}
    return settings | {
        "score": None if arguments.score == "msp" else arguments.score
    }  # none where it was not known yet


def _objectives(arguments: argparse.Namespace) -> list[str]:
    """What circuits are extracted for; refuses arguments that do not go together."""
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
    if arguments.objectives is None and arguments.members not in (None, len(objectives)):
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


def _check_heads(arguments: argparse.Namespace, config: PreTrainedConfig, objectives: list[str], members: int) -> None:
    """Refuses numbers that the model's heads do not allow."""
    if getattr(config, "num_members", 1) > 1:
        raise CommandError(
            f"{arguments.model} is a Hydra of {config.num_members} members: pass the backbone, or one member"
        )
    if arguments.method == "taylor":
        most = _most_heads_in_a_layer(config)
        if _heads_per_layer(arguments, config) >= most:
            raise CommandError(
                f"--heads-per-layer is {_heads_per_layer(arguments, config)}, of at most {most} heads in a layer: that cuts "
                + (f"nothing, pass 1 to {most - 1}" if most > 1 else "nothing, and there is none to spare")
            )
        return
    every = _num_heads(config)
    budget, out_of = _budget(arguments, config), _out_of(arguments, config, objectives, members)
    if not 1 <= budget < every:
        raise CommandError(f"--budget is {budget}: {every} heads compete, so pass 1 to {every - 1}")
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
    return arguments.heads_per_layer or max(1, round(_most_heads_in_a_layer(config) * 2 / 3))


def _most_heads_in_a_layer(config: PreTrainedConfig) -> int:
    """In the tower that Taylor pruning looks at, for CLIP that of images."""
    tower = next(iter(tower_configs(config).values()))
    if hasattr(tower, "kept_heads"):
        return max(len(layer[0]) for layer in tower.kept_heads)
    return tower.num_attention_heads


def _budget(arguments: argparse.Namespace, config: PreTrainedConfig) -> int:
    return arguments.budget or max(1, _num_heads(config) // 3)


def _out_of(arguments: argparse.Namespace, config: PreTrainedConfig, objectives: list[str], members: int) -> int:
    """How many heads a circuit ranks: those to sample from where it is the only one, otherwise the budget."""
    budget = _budget(arguments, config)
    if len(objectives) > 1:
        return budget
    enough = max(2 * budget, budget + members - 1)  # so that members can differ
    return arguments.out_of or max(budget, min(enough, _num_heads(config) - 1))


def _taylor_members(arguments, model: PreTrainedModel, data: Any, members: int, prompts: dict | None) -> list:
    keep = _heads_per_layer(arguments, model.config)
    loader = torch.utils.data.DataLoader(data, arguments.batch_size)
    return draw_members(
        model,
        dataloader=loader,
        heads_per_layer=keep,
        num_members=members,
        seed=arguments.seed,
        class_prompts=prompts,
        allow_equal=arguments.allow_equal,
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
            mode=arguments.mode,
            batch_size=arguments.batch_size,
            checkpoint=arguments.output / CIRCUITS / f"{objective}.checkpoint",
        )
        circuit.save(arguments.output / CIRCUITS / f"{objective}.json")
        print(
            f"circuit for {objective}: score {circuit.dense_score:.4f} with all heads, {circuit.scores[-1]:.4f} without "
            f"{out_of}, best without {circuit.best_budget}",
            flush=True,
        )
        circuits.append(circuit)
    if len(circuits) > 1:
        return draw_members(model, circuits=circuits, budget=budget, allow_equal=arguments.allow_equal)
    return draw_members(
        model,
        circuit=circuits[0],
        budget=budget,
        out_of=out_of,
        num_members=members,
        seed=arguments.seed,
        allow_equal=arguments.allow_equal,
    )


def _num_heads(config: PreTrainedConfig) -> int:
    """How many heads a backbone or a member has, in all layers of all towers."""
    towers = tower_configs(config).values()
    if all(hasattr(config, "kept_heads") for config in towers):
        return sum(len(layer[0]) for config in towers for layer in config.kept_heads)
    return sum(config.num_hidden_layers * config.num_attention_heads for config in towers)


def _save_member(folder: Path, member: PreTrainedModel, processor: Any) -> None:
    with written_whole(folder) as unfinished:
        member.save_pretrained(unfinished)
        processor.save_pretrained(unfinished)


# finetune


def add_finetune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the output of `prune`")
    parser.add_argument("--recipe", choices=sorted(RECIPES), required=True, help="how to train, as in the paper")
    parser.add_argument(
        "--validation-split",
        help="default: a tenth of the training rows, at most 3,000, is held out, drawn at random; with the recipe sst2 the "
        "first rows are",
    )
    parser.add_argument(
        "--learning-rates",
        nargs="+",
        type=learning_rate,
        metavar="LR",
        help='to choose from by validation, or "grid" for the recipe\'s',
    )
    parser.add_argument(
        "--max-steps", type=positive, metavar="N", help="train for N steps instead of the recipe's length"
    )
    parser.add_argument("--seed", type=seed, default=0, help="member i trains with seed + i (default: %(default)s)")
    add_batch_size(parser, 32)
    add_data(parser, "train")
    add_output(parser, "gets the trained members; run again to go on after a stop")


def finetune(arguments: argparse.Namespace) -> None:
    recipe = shortened(RECIPES[arguments.recipe], arguments.max_steps)
    learning_rates = _learning_rates(arguments.learning_rates, recipe)
    folders = members_in(arguments.folder)
    config = load_config(str(folders[0]))
    if len(tower_configs(config)) > 1:
        raise CommandError(
            "members with two towers have no classifier to fine-tune and are fused as they are: go on with `fuse`"
        )
    claim_for_training(arguments.output, arguments.folder, len(folders))
    processor = load_processor(arguments.processor or str(folders[0]), config)
    train, validation = _train_and_validation(arguments, config, processor)
    if hasattr(config, "image_size"):
        print("training images pass the model's image processor only: the recipe's augmentation is not applied")
    copy_circuits(arguments.folder, arguments.output)
    finetune_members(
        [load_model(str(folder)) for folder in folders],
        recipe,
        train,
        validation,
        arguments.output,
        seed=arguments.seed,
        learning_rates=learning_rates,
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    for index in range(len(folders)):
        processor.save_pretrained(arguments.output / f"member-{index}")
    print(f"Next: hydra-transformers fuse {arguments.output} --output ...")


def _train_and_validation(arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any) -> tuple[Any, Any]:
    rows = read_data(arguments, config, processor, split=arguments.split, prefer=("train",))
    check_can_be_learnt_from(rows, arguments.data, "to learn")
    if arguments.validation_split is None:
        train, validation = _held_out(rows, arguments.seed, arguments.recipe in VALIDATES_ON_FIRST_ROWS)
        print(f"{len(train):,} rows to train, {len(validation):,} held out for validation")
        return train, validation
    validation = read_data(arguments, config, processor, split=arguments.validation_split)
    if overlap(rows.split, validation.split):
        raise CommandError(
            f"--validation-split {validation.split} has rows of the training split {rows.split}: pass another, or leave it "
            "out to hold out a part"
        )
    return rows, validation


def overlap(split: str | None, other: str | None) -> bool:
    """Whether two splits surely have rows in common: they are the same, or one is a part of the other."""
    if split is None or other is None:  # the only one
        return split == other
    is_of_same = split.partition("[")[0] == other.partition("[")[0]
    return is_of_same and (split == other or "[" not in split or "[" not in other)


def shortened(recipe: Recipe, max_steps: int | None) -> Recipe:
    """The recipe with another number of steps; the warm-up keeps its share."""
    if max_steps is None:
        return recipe
    warmup = recipe.warmup_steps if recipe.warmup_steps < 1 else recipe.warmup_steps / recipe.max_steps
    return replace(recipe, max_steps=max_steps, epochs=None, warmup_steps=warmup)


def _held_out(rows: Any, seed: int, takes_first: bool) -> tuple[Any, Any]:
    """All but a tenth of the rows, and that tenth: the first of them, or random ones."""
    count = min(MOST_VALIDATION_ROWS, max(1, len(rows) // 10))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    order = range(len(rows)) if takes_first else order
    subset = torch.utils.data.Subset
    return subset(rows, order[count:]), subset(rows, order[:count])


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


def add_fuse(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="the output of `finetune` or `prune`")
    parser.add_argument(
        "--shared",
        nargs="*",
        choices=SHARED_PARTS,
        default=list(SHARED_PARTS),
        metavar="PART",
        help=f"what becomes the mean over the members, of {', '.join(SHARED_PARTS)} (default: all; none for a Deep Ensemble "
        "in one forward)",
    )
    parser.add_argument("--allow-equal", action="store_true", help="fuse members although they are the same model")
    add_output(parser, "gets the Hydra with its code and processor, ready for the Hub")


def fuse(arguments: argparse.Namespace) -> None:
    folders = members_in(arguments.folder)
    check_is_new(arguments.output)
    check_takes_files(arguments.output)
    configs = [load_config(str(folder)) for folder in folders]
    circuits_of(arguments.folder, configs)  # refuses those that a card could not be made of
    processor = load_processor(str(folders[0]), configs[0])
    members = [load_model(str(folder)) for folder in folders]
    if not arguments.allow_equal:
        _refuse_equal(members, folders)
    with written_whole(arguments.output) as unfinished:
        hydra = type(members[0]).from_pruned_members(members, shared=arguments.shared)
        hydra.save_pretrained(unfinished)
        processor.save_pretrained(unfinished)
        copy_circuits(arguments.folder, unfinished)
    print(f"{len(members)} members are one model in {arguments.output}.")
    print(f"Next: hydra-transformers evaluate {arguments.output} --data ...")


def _refuse_equal(members: list[PreTrainedModel], folders: list[Path]) -> None:
    """Members of equal weights agree on everything, so that the Hydra would be one model at the price of several."""
    first: dict[str, Path] = {}
    for member, folder in zip(members, folders, strict=True):
        equal = first.setdefault(fingerprint_of_weights(member), folder)
        if equal is not folder:
            raise CommandError(
                f"{equal.name} and {folder.name} have the same heads and weights and would agree on everything: prune with "
                "another --budget or other data, or pass --allow-equal"
            )
