"""`prune`, `finetune` and `fuse`: from a backbone to members to a Hydra."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..files import written_whole
from ..fingerprints import fingerprint_of_weights
from ..models.configuration_hydra import SHARED_PARTS
from ..models.fusion import tower_configs
from ..pruning import Circuit, draw_members, extract_circuit
from ..pruning.scoring import OBJECTIVES
from ..training import RECIPES, Recipe, finetune_members
from .arguments import add_batch_size, add_data, add_device, add_output, class_prompts, device_of, positive, read_data
from .folders import (
    CIRCUITS,
    check_is_new,
    claim,
    copy_circuits,
    load_model,
    load_processor,
    members_in,
)
from .problems import CommandError


PRUNE_SETTINGS = "prune.json"
CALIBRATION_SPLITS = ("train", "validation", "test")
MOST_VALIDATION_ROWS = 3_000


# prune


def add_prune(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a ViT, BERT or CLIP classifier: Hub name or folder")
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
        help="heads to sample from with a single objective (default: two thirds)",
    )
    parser.add_argument("--mode", choices=("exact", "shortlist"), default="exact", help="default: %(default)s")
    parser.add_argument("--ood-data", metavar="NAME_OR_FOLDER", help="out-of-distribution data for ood and avg")
    parser.add_argument("--ood-split", help="default: train, validation or test, whichever comes first")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
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
    claim(arguments.output, PRUNE_SETTINGS, _settings(arguments, objectives, members))
    if all((arguments.output / f"member-{index}" / "config.json").exists() for index in range(members)):
        print(f"{arguments.output} is finished already.")
        return
    model = load_model(arguments.model, device_of(arguments))
    processor = load_processor(arguments.processor or arguments.model, model.config)
    data = read_data(arguments, model.config, processor, split=arguments.split, prefer=CALIBRATION_SPLITS)
    prompts = class_prompts(model.config, processor, data)
    if arguments.method == "taylor":
        pruned = _taylor_members(arguments, model, data, members, prompts)
    else:
        pruned = _circuit_members(arguments, model, processor, data, objectives, members, prompts)
    for index, member in enumerate(pruned):
        _save_member(arguments.output / f"member-{index}", member, processor)
    for checkpoint in (arguments.output / CIRCUITS).glob("*.checkpoint"):
        checkpoint.unlink()
    kept = ", ".join(str(_num_heads(member)) for member in pruned)
    print(f"{len(pruned)} members with {kept} of {_num_heads(model)} heads are in {arguments.output}.")
    print(f"Next: hydra-transformers finetune {arguments.output} --recipe ... --data ... --output ...")
    print(
        "(Or, with a tenth to a sixth of the heads gone, hydra-transformers fuse: few lost heads may need no training.)"
    )


def _settings(arguments: argparse.Namespace, objectives: list[str], members: int) -> dict[str, Any]:
    """What the members depend on: a folder made with other settings is another step's."""
    names = ("model", "method", "data", "split", "ood_data", "ood_split", "limit", "budget", "heads_per_layer")
    names += ("out_of", "mode", "seed", "image_column", "text_column", "label_column", "labels_in_order")
    return {name: getattr(arguments, name) for name in names} | {"objectives": objectives, "members": members}


def _objectives(arguments: argparse.Namespace) -> list[str]:
    """What circuits are extracted for; refuses arguments that do not go together."""
    if arguments.method == "taylor":
        for name in ("budget", "objectives", "out_of", "ood_data"):
            if getattr(arguments, name) is not None:
                raise CommandError(f"--{name.replace('_', '-')} is for --method circuits: leave it out")
        return []
    if arguments.heads_per_layer is not None:
        raise CommandError("--heads-per-layer is for --method taylor: pass --budget, the heads each member loses")
    objectives = arguments.objectives or (list(OBJECTIVES) if arguments.ood_data else ["acc"])
    if arguments.objectives is None and arguments.members not in (None, len(objectives)):
        objectives = objectives[-1:]
    if len(objectives) > 1 and arguments.members not in (None, len(objectives)):
        raise CommandError(f"{len(objectives)} objectives make {len(objectives)} members, not {arguments.members}")
    if objectives != ["acc"] and arguments.ood_data is None:
        raise CommandError(f"the objective {objectives[-1]} needs out-of-distribution data: pass --ood-data")
    return objectives


def _taylor_members(arguments, model: PreTrainedModel, data: Any, members: int, prompts: dict | None) -> list:
    heads = min(config.num_attention_heads for config in tower_configs(model.config).values())
    keep = arguments.heads_per_layer or max(1, round(heads * 2 / 3))
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


def _circuit_members(arguments, model, processor, data, objectives: list[str], members: int, prompts) -> list:
    budget = arguments.budget or max(1, _num_heads(model) // 3)
    out_of = (arguments.out_of or min(2 * budget, _num_heads(model) - 1)) if len(objectives) == 1 else budget
    unknown = None
    if arguments.ood_data is not None:
        ood = (arguments.ood_data, arguments.ood_split)
        unknown = read_data(arguments, model.config, processor, *ood, labelled=False, prefer=CALIBRATION_SPLITS)
    circuits = []
    for objective in objectives:
        circuit = extract_circuit(
            model,
            data,
            unknown,
            objective,
            budget=out_of,
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


def _num_heads(model: PreTrainedModel) -> int:
    """How many heads a backbone or a member has, in all layers of all towers."""
    towers = tower_configs(model.config).values()
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
    parser.add_argument("--validation-split", help="default: a tenth of the training rows, at most 3,000, is held out")
    parser.add_argument(
        "--learning-rates", nargs="+", metavar="LR", help='to choose from by validation, or "grid" for the recipe\'s'
    )
    parser.add_argument(
        "--max-steps", type=positive, metavar="N", help="train for N steps instead of the recipe's length"
    )
    parser.add_argument("--seed", type=int, default=0, help="member i trains with seed + i (default: %(default)s)")
    add_batch_size(parser, 32)
    add_data(parser, "train")
    add_output(parser, "gets the trained members; run again to go on after a stop")


def finetune(arguments: argparse.Namespace) -> None:
    folders = members_in(arguments.folder)
    members = [load_model(str(folder)) for folder in folders]
    config = members[0].config
    if config.model_type == "hydra_clip":
        raise CommandError("CLIP members have no classifier to fine-tune and are fused as they are: go on with `fuse`")
    processor = load_processor(arguments.processor or str(folders[0]), config)
    rows = read_data(arguments, config, processor, split=arguments.split, prefer=("train",))
    if arguments.validation_split is None:
        train, validation = _held_out(rows, arguments.seed)
        print(f"{len(train):,} rows to train, {len(validation):,} held out for validation")
    else:
        train, validation = rows, read_data(arguments, config, processor, split=arguments.validation_split)
    recipe = shortened(RECIPES[arguments.recipe], arguments.max_steps)
    if config.model_type == "hydra_vit":
        print("training images pass the model's image processor only: the recipe's augmentation is not applied")
    finetune_members(
        members,
        recipe,
        train,
        validation,
        arguments.output,
        seed=arguments.seed,
        learning_rates=_learning_rates(arguments.learning_rates),
        per_device_train_batch_size=arguments.batch_size,
        per_device_eval_batch_size=arguments.batch_size,
        report_to="none",
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    for index in range(len(members)):
        processor.save_pretrained(arguments.output / f"member-{index}")
    copy_circuits(arguments.folder, arguments.output)
    print(f"Next: hydra-transformers fuse {arguments.output} --output ...")


def shortened(recipe: Recipe, max_steps: int | None) -> Recipe:
    """The recipe with another number of steps; the warm-up keeps its share."""
    if max_steps is None:
        return recipe
    warmup = recipe.warmup_steps if recipe.warmup_steps < 1 else recipe.warmup_steps / recipe.max_steps
    return replace(recipe, max_steps=max_steps, epochs=None, warmup_steps=warmup)


def _held_out(rows: Any, seed: int) -> tuple[Any, Any]:
    """All but a random tenth of the rows, and that tenth."""
    if len(rows) < 2:
        raise CommandError("there is only 1 row to train with: read more, or pass --validation-split")
    count = min(MOST_VALIDATION_ROWS, max(1, len(rows) // 10))
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed)).tolist()
    subset = torch.utils.data.Subset
    return subset(rows, order[count:]), subset(rows, order[:count])


def _learning_rates(texts: list[str] | None) -> str | list[float] | None:
    if texts is None:
        return None
    if texts == ["grid"]:
        return "grid"
    try:
        return [float(text) for text in texts]
    except ValueError as error:
        raise CommandError(f"--learning-rates got {' '.join(texts)}: pass numbers, or the word grid") from error


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
    members = [load_model(str(folder)) for folder in folders]
    if not arguments.allow_equal:
        _refuse_equal(members, folders)
    hydra = type(members[0]).from_pruned_members(members, shared=arguments.shared)
    processor = load_processor(str(folders[0]), hydra.config)
    with written_whole(arguments.output) as unfinished:
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


def saved_circuits(folder: Path) -> list[Circuit] | None:
    """The circuits that came along with a model, in the order of its members."""
    paths = [folder / CIRCUITS / f"{objective}.json" for objective in OBJECTIVES]
    return [Circuit.load(path) for path in paths if path.exists()] or None
