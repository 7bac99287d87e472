"""`prune`: from one model, or several checkpoints, to members without some of their heads."""

from pathlib import Path

from .folders import PRUNE_SETTINGS, claim, models_named
from .options import DataOptions, OodData, Seed, argument, best_device, choice, layers_or_share, one_of, option


OBJECTIVES = ("acc", "ood", "avg")


def prune(
    models: argument(
        list[str],
        "MODEL",
        "a classifier or a CLIP or SigLIP model, by Hub name or folder; or several checkpoints of one pre-trained model: then "
        "each makes one member, by its own circuit",
    ),
    data: DataOptions,
    output: option(Path, "gets member-0, member-1, ... and the circuits; run again to continue after a stop", "DIR"),
    method: option(choice(("circuits", "taylor")), "how heads are chosen") = "circuits",
    members: option(int | None, "how many members (default: 3)", "M", min=1) = None,
    budget: option(int | None, "circuits: heads that each member loses (default: a sixth of them)", "N", min=1) = None,
    heads_per_layer: option(
        int | None, "taylor: heads that each layer keeps (default: two thirds)", "N", min=1
    ) = None,
    objectives: option(
        list[str] | None,
        "circuits: one objective per member; with a single one, members are sampled from its ranking (default: acc ood avg "
        "with --ood-data, otherwise acc); for several models one for all (default: avg, or acc)",
        "|".join(OBJECTIVES) + "...",
        parser=one_of(OBJECTIVES),
    ) = None,
    trunk_layers: option(
        float,
        "keep all heads of the first N layers, or of a share such as 0.75, which fused members can then share",
        "N",
        parser=layers_or_share,
    ) = 0,
    ood_data: OodData = None,
    seed: Seed = 0,
) -> None:
    """Cut different heads out of copies of one model, or out of several checkpoints, each by its own circuit."""
    from .._io.files import written_whole
    from .._io.processes import on_one_process
    from ..data.loading import check_has_variety
    from ..data.processors import check_same_processors, class_prompts, load_processor
    from ..pruning import make_members
    from ..serving.saved_models import load_config, load_model

    names = models_named(models)
    configs = [load_config(name) for name in names]
    settings = {"model": names, "method": method, "budget": budget, "heads_per_layer": heads_per_layer}
    settings |= {"objectives": objectives or None, "trunk_layers": trunk_layers, "ood_data": ood_data, "seed": seed}
    count = members or (len(names) if len(names) > 1 else 3)
    on_one_process(lambda: claim(output, PRUNE_SETTINGS, settings | {"members": count} | vars(data)))
    if all((output / f"member-{index}" / "config.json").exists() for index in range(count)):
        print(f"{output} is finished already.")
        return
    processor = load_processor(names[0], configs[0])
    check_same_processors(names, configs, processor)
    rows = data.read(configs[0], processor)
    check_has_variety(rows, data.data, "to choose heads by", by_classes=objectives != ["ood"])
    ood_rows = None if ood_data is None else data.read(configs[0], processor, ood_data, labelled=False)
    pruned = make_members(
        [load_model(name, best_device()) for name in names],
        rows,
        ood_rows,
        method=method,
        num_members=members,
        budget=budget,
        heads_per_layer=heads_per_layer,
        objectives=objectives or None,
        trunk_layers=trunk_layers,
        seed=seed,
        class_prompts=class_prompts(configs[0], processor, rows.class_names),
        folder=output,
    )

    def save() -> None:
        for index, member in enumerate(pruned):
            with written_whole(output / f"member-{index}") as unfinished:
                member.save_pretrained(unfinished)
                processor.save_pretrained(unfinished)

    on_one_process(save)
    print(f"{len(pruned)} members are in {output}.")
    print(f"Next: hydra-transformers finetune {output} --data ... --output ..., or hydra-transformers fuse {output}")
