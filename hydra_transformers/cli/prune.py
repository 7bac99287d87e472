"""`prune`: from one model, or several fine-tunings, to members with heads cut out."""

from pathlib import Path
from typing import Annotated, Any

import typer

from .._io.files import written_whole
from ..data.processors import class_prompts, load_processor
from ..data.rows import SPLITS_TO_CUT, is_same_source
from ..fusion import check_can_be_fused
from ..pruning.member_plan import CIRCUITS, METHODS, MemberPlan, num_heads
from ..pruning.objectives import OBJECTIVES, OOD_SCORES
from .folders import PRUNE_SETTINGS, check_same_processors, claim, load_config, load_model, models_named
from .options import (
    BatchSize,
    Device,
    Mode,
    OodSplit,
    PartOptions,
    Seed,
    choice,
    device_named,
    one_of,
    option,
    positive_or_best,
    switch,
)
from .rows import check_can_be_learnt_from


# What the members depend on: a folder made with other settings is another step's.
SETTINGS = (
    "data",
    "split",
    "part",
    "limit",
    "image_column",
    "audio_column",
    "text_column",
    "max_length",
    "label_column",
)
SETTINGS += ("labels_in_order", "processor")


def prune(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL",
            help="a classifier or a CLIP or SigLIP model, by Hub name or folder; or several fine-tunings of one pre-trained model, "
            "or the folder of `finetune` that holds them: then each makes one member, by a circuit of its own",
        ),
    ],
    data: PartOptions,
    output: Annotated[
        Path, option("gets member-0, member-1, ... and the circuits; run again to go on after a stop", "DIR")
    ],
    method: Annotated[choice(METHODS), option("how heads are chosen")] = "circuits",
    members: Annotated[int | None, option("how many members (default: 3)", "M", min=1)] = None,
    budget: Annotated[
        Any,
        option(
            "circuits: heads each member loses (default: a sixth of those that compete); best: those that its own circuit scores "
            "best without, at most a third",
            "N",
            parser=positive_or_best,
        ),
    ] = None,
    heads_per_layer: Annotated[
        int | None, option("taylor: heads each layer keeps (default: two thirds)", "N", min=1)
    ] = None,
    objectives: Annotated[
        list[str] | None,
        option(
            "circuits: what a circuit is extracted for, one member each; with a single one, members are sampled from its "
            "ranking (default: acc ood avg with --ood-data, otherwise acc); of several models a single one (default: avg with "
            "--ood-data, otherwise acc)",
            "|".join(OBJECTIVES) + "...",
            parser=one_of(OBJECTIVES),
        ),
    ] = None,
    out_of: Annotated[
        int | None,
        option(
            "circuits, with a single objective: the first N heads of its ranking are those to sample from (default: twice the "
            "budget)",
            "N",
            min=1,
        ),
    ] = None,
    trunk_layers: Annotated[
        int, option("cut nothing out of the first N layers, for members that run them once when fused", "N", min=0)
    ] = 0,
    mode: Mode = "exact",
    ood_data: Annotated[str | None, option("out-of-distribution data for ood and avg", "NAME_OR_FOLDER")] = None,
    ood_split: OodSplit = None,
    score: Annotated[
        choice(OOD_SCORES), option("circuits for ood and avg: the OOD score, best the one that will be used")
    ] = "msp",
    seed: Seed = 0,
    allow_equal: Annotated[
        bool, switch("--allow-equal", "take members that lose the same heads, to be trained apart")
    ] = False,
    batch_size: BatchSize = 32,
    device: Device = None,
) -> None:
    """Cut heads out of several fine-tunings, each by its own circuit, or different heads out of copies of one model."""
    names = models_named(models)
    plan = MemberPlan(
        num_models=len(names),
        has_ood_data=ood_data is not None,
        method=method,
        num_members=members,
        budget=budget,
        heads_per_layer=heads_per_layer,
        objectives=objectives or None,
        out_of=out_of,
        trunk_layers=trunk_layers,
        mode=mode,
        score=score,
        seed=seed,
        allow_equal=allow_equal,
    )
    if ood_split is not None and ood_data is None:
        raise ValueError("--ood-split is a split of --ood-data: pass that, too")
    device = device_named(device)
    configs = [load_config(name) for name in names]
    for name, config in zip(names, configs, strict=True):
        plan.check_heads(config, name)
    settings = {"model": names[0] if len(names) == 1 else names, "objectives": plan.chosen_objectives}
    settings |= {"members": plan.members, "method": method, "ood_data": ood_data, "ood_split": ood_split}
    settings |= {"budget": budget, "heads_per_layer": heads_per_layer, "out_of": out_of, "mode": mode, "seed": seed}
    settings |= {"score": score, "trunk_layers": trunk_layers, **{name: getattr(data, name) for name in SETTINGS}}
    claim(output, PRUNE_SETTINGS, settings)
    if all((output / f"member-{index}" / "config.json").exists() for index in range(plan.members)):
        print(f"{output} is finished already.")
        return
    loaded, config = [load_model(name, device) for name in names], configs[0]
    if len(loaded) > 1:
        # Before it takes long to find equal circuits.
        check_can_be_fused(loaded, "MODEL", allow_equal or method != "circuits")
    processor = load_processor(data.processor or names[0], config)
    if data.processor is None:
        check_same_processors(names, configs, processor)
    rows = data.read(config, processor, split=data.split, prefer=SPLITS_TO_CUT, part=data.part)
    check_can_be_learnt_from(rows, data.data, "to choose heads by", by_classes=plan.chosen_objectives != ["ood"])
    foreign = None if ood_data is None else _foreign_rows(data, config, processor, ood_data, ood_split, rows)
    pruned = plan.make_members(
        loaded,
        rows,
        foreign,
        class_prompts=class_prompts(config, processor, rows.class_names),
        batch_size=batch_size,
        folder=output,
        tell=lambda sentence: print(sentence, flush=True),
    )
    for index, member in enumerate(pruned):
        with written_whole(output / f"member-{index}") as unfinished:
            member.save_pretrained(unfinished)
            processor.save_pretrained(unfinished)
    for checkpoint in (output / CIRCUITS).glob("*.checkpoint"):
        checkpoint.unlink()
    kept = ", ".join(str(num_heads(member.config)) for member in pruned)
    print(f"{len(pruned)} members with {kept} of {num_heads(config)} heads are in {output}.")
    print(f"Next: hydra-transformers finetune {output} --data ... --output ...")
    print(
        "(Or, with a tenth to a sixth of the heads gone, hydra-transformers fuse: few lost heads may need no training.)"
    )


def _foreign_rows(data: PartOptions, config: Any, processor: Any, name: str, split: str | None, rows: Any) -> Any:
    """The out-of-distribution data; refuses the data itself."""
    found = data.read(config, processor, name, split, labelled=False, prefer=SPLITS_TO_CUT)
    if is_same_source(data.data, name) and rows.split == found.split:
        raise ValueError(
            f"--ood-data {name} is the data itself, which cannot be out of its own distribution: pass other data, or another "
            "--ood-split of it"
        )
    if len(found) < 2:
        raise ValueError(f"{name} gives 1 row, too few to tell it from the data by: read more of it")
    return found
