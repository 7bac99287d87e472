"""`prune`: from one model, or several fine-tunings, to members without some of their heads."""

from pathlib import Path
from typing import Any

from .._io.files import written_whole
from .._io.processes import on_one_process
from ..data.loading import check_has_variety
from ..data.processors import check_same_processors, class_prompts, load_processor
from ..data.rows import SPLITS_TO_CUT, is_same_source
from ..fusion import check_can_be_fused
from ..pruning.member_plan import CIRCUITS, METHODS, MemberPlan, num_heads
from ..pruning.objectives import OBJECTIVES
from . import flags
from .folders import PRUNE_SETTINGS, claim, load_config, load_model, models_named
from .options import argument, choice, device_named, layers_or_share, one_of, option, positive_or_best, switch


def prune(
    models: argument(
        list[str],
        "MODEL",
        "a classifier or a CLIP or SigLIP model, by Hub name or folder; or several fine-tunings of one pre-trained model, or "
        "the folder of `finetune` with them: then each makes one member, by its own circuit",
    ),
    data: flags.PartOptions,
    output: option(Path, "gets member-0, member-1, ... and the circuits; run again to continue after a stop", "DIR"),
    method: option(choice(METHODS), "how heads are chosen") = "circuits",
    members: option(int | None, "how many members (default: 3)", "M", min=1) = None,
    budget: option(
        Any,
        "circuits: heads each member loses (default: a sixth of the candidates); best: as many as its circuit scores best "
        "without, at most a third",
        "N",
        parser=positive_or_best,
    ) = None,
    heads_per_layer: option(int | None, "taylor: heads each layer keeps (default: two thirds)", "N", min=1) = None,
    objectives: option(
        list[str] | None,
        "circuits: one objective per member; with a single one, members are sampled from its ranking (default: acc ood avg "
        "with --ood-data, otherwise acc); for several models one for all (default: avg with --ood-data, otherwise acc)",
        "|".join(OBJECTIVES) + "...",
        parser=one_of(OBJECTIVES),
    ) = None,
    out_of: option(
        int | None,
        "circuits, with a single objective: sample from the first N heads of its ranking (default: twice the budget)",
        "N",
        min=1,
    ) = None,
    trunk_layers: option(
        Any,
        "keep all heads of the first N layers, or of a share such as 0.75, which fused members can then share",
        "N",
        parser=layers_or_share,
    ) = 0,
    mode: flags.Mode = "exact",
    ood_data: option(str | None, "out-of-distribution data for ood and avg", "NAME_OR_FOLDER") = None,
    ood_split: flags.OodSplit = None,
    score: option(
        choice(("msp",)), "circuits for ood and avg: the OOD score"
    ) = "msp",
    seed: flags.Seed = 0,
    allow_equal: switch("--allow-equal", "allow members that lose the same heads, to be trained apart") = False,
    batch_size: flags.BatchSize = 32,
    device: flags.Device = None,
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
    settings |= {"score": score, "trunk_layers": trunk_layers, **vars(data)}
    on_one_process(lambda: claim(output, PRUNE_SETTINGS, settings))
    if all((output / f"member-{index}" / "config.json").exists() for index in range(plan.members)):
        print(f"{output} is finished already.")
        return
    loaded, config = [load_model(name, device) for name in names], configs[0]
    if len(loaded) > 1:
        check_can_be_fused(loaded, "MODEL", allow_equal or method != "circuits")  # before the long extraction
    processor = load_processor(data.processor or names[0], config)
    if data.processor is None:
        check_same_processors(names, configs, processor)
    rows = data.read_part(config, processor, prefer=SPLITS_TO_CUT)
    check_has_variety(rows, data.data, "to choose heads by", by_classes=plan.chosen_objectives != ["ood"])
    ood_rows = None
    if ood_data is not None:
        ood_rows = data.read(config, processor, ood_data, ood_split, labelled=False, prefer=SPLITS_TO_CUT)
        if is_same_source(data.data, ood_data) and rows.split == ood_rows.split:
            raise ValueError(
                f"--ood-data {ood_data} is the data itself: pass other data, or another --ood-split of it"
            )
        check_has_variety(ood_rows, ood_data, "to tell it from the data", by_classes=False)
    pruned = plan.make_members(
        loaded,
        rows,
        ood_rows,
        class_prompts=class_prompts(config, processor, rows.class_names),
        batch_size=batch_size,
        folder=output,
        tell=lambda sentence: print(sentence, flush=True),
    )

    def save() -> None:
        for index, member in enumerate(pruned):
            with written_whole(output / f"member-{index}") as unfinished:
                member.save_pretrained(unfinished)
                processor.save_pretrained(unfinished)
        for checkpoint in (output / CIRCUITS).glob("*.checkpoint"):
            checkpoint.unlink()

    on_one_process(save)
    kept = ", ".join(str(num_heads(member.config)) for member in pruned)
    print(f"{len(pruned)} members with {kept} of {num_heads(config)} heads are in {output}.")
    print(f"Next: hydra-transformers finetune {output} --data ... --output ...")
    print(
        "(Or hydra-transformers fuse at once, if hydra-transformers evaluate shows that the members need no training.)"
    )
