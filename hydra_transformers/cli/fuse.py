"""`fuse`: checkpoints of one pre-trained model, or pruned members, become one model."""

import sys
from pathlib import Path
from typing import Any

from .folders import check_is_new, models_named
from .options import argument, layers_or_share, one_of, option, switch


SHARED_PARTS = ("embeddings", "layernorm", "mlp")


def fuse(
    members: argument(
        list[str],
        "DIR_OR_MODEL",
        "fine-tuned checkpoints of one pre-trained model, by folder or Hub name; or the folder of `prune` or `finetune` with "
        "its members",
    ),
    output: option(Path, "gets the Hydra with its code and processor, ready for the Hub", "DIR"),
    shared: option(
        list[str],
        f"the parts that become the mean over the members, of {', '.join(SHARED_PARTS)} (default: all; none for a Deep "
        "Ensemble in one forward)",
        "[PART...]",
        parser=one_of(("", *SHARED_PARTS)),
        show_default=False,
    ) = SHARED_PARTS,
    trunk_layers: option(
        Any,
        "merge the first N layers whole, so that they run once for all members: a number, or a share such as 0.75 (default: "
        "those that are equal in all members, which changes no prediction)",
        "N",
        parser=layers_or_share,
    ) = None,
    data: option(str | None, "validation data: choose the trunk by it, as `compare` does", "NAME_OR_FOLDER") = None,
    split: option(str | None, "of --data (default: the first of validation, test and train)") = None,
    aggregate: option(
        str | None,
        "of reward models and rerankers: the members' scores become one as their mean, min, or mean-2std (the mean minus twice "
        "their spread)",
        "NAME",
    ) = None,
    allow_equal: switch("--allow-equal", "fuse members although they are the same model") = False,
) -> None:
    """Make one model of several checkpoints or members."""
    from .._io.files import written_whole
    from ..data.processors import check_same_processors, find_processor
    from ..hub.member_heads import copy_circuits, load_circuits, trunk_sentence
    from ..models.auto import AutoHydra
    from ..models.configuration_hydra import times_of_spread
    from ..serving.saved_models import load_config, load_model

    folder = Path(members[0]) if len(members) == 1 else None
    names = models_named(members)
    configs = [load_config(name) for name in names]
    check_is_new(output)
    if aggregate is not None:
        times_of_spread(aggregate)  # raises for unknown names
    if folder is not None:
        load_circuits(folder, configs)  # raises for circuits that a card could not describe
    processor = find_processor(names[0], configs[0])
    if processor is not None:
        check_same_processors(names, configs, processor)
    models = [load_model(name) for name in names]
    if data is not None:
        from .compare import compared

        if trunk_layers is not None:
            raise ValueError("--data chooses the trunk, and --trunk-layers names it: pass one of them")
        result = compared(models, names[0], configs[0], processor, data, split)
        print(result)
        trunk_layers = result.best.trunk_layers
    hydra = AutoHydra.from_pruned_members(models, [part for part in shared if part], trunk_layers, allow_equal)
    if aggregate is not None:
        hydra.config.aggregate = aggregate
    with written_whole(output) as unfinished:
        hydra.save_pretrained(unfinished)
        if processor is not None:
            processor.save_pretrained(unfinished)
        if folder is not None:
            copy_circuits(folder, unfinished)
    if processor is None:
        print(f"note: {names[0]} has no processor, so {output} has none: save one there", file=sys.stderr)
    once = trunk_sentence(hydra.config)
    print(f"{hydra.num_members} members are one model in {output}{f'; {once}' if once else ''}.")
    if data is None and len(names) > 1:
        print(f"Fusing can cost accuracy: check it with hydra-transformers compare {' '.join(members)} --data ...")
    print(f"Next: hydra-transformers calibrate {output} --data ... --output ...")
