"""`fuse`: members become one model."""

import json
import sys
from pathlib import Path
from typing import Any

from .._io.files import write_atomically, written_whole
from ..baselines import average_members
from ..data.processors import check_same_processors, find_processor, load_processor
from ..fusion import number_of_layers, saved_tower_configs
from ..hub.member_heads import copy_circuits, load_circuits
from ..models.auto import AutoHydra
from ..models.configuration_hydra import SHARED_PARTS, times_of_spread
from .folders import (
    FUSE_SETTINGS,
    are_fine_tunings,
    check_is_new,
    digest_of_names,
    load_config,
    load_model,
    made_by,
    members_in,
)
from .options import argument, layers_or_share, one_of, option, switch


def fuse(
    members: argument(
        list[str],
        "DIR_OR_MODEL",
        "the output of `finetune` or `prune`; or the members themselves, by folder or Hub name: plain models of "
        "Transformers, fine-tuned from one pre-trained model, or Hydras",
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
        "merge the first N layers whole, attention too, so that they run once for all members: a number, or a share such as "
        "0.75; 0 for none (default: those that are equal in all members, which changes no answer)",
        "N",
        parser=layers_or_share,
    ) = None,
    aggregate: option(
        str | None,
        "of reward models and rerankers: the members' scores become one as their mean, min, or mean-2std (the mean minus twice "
        "their spread)",
        "NAME",
    ) = None,
    average_into: option(
        int | None, "average more fine-tunings into M members first, such as six into three, two into each", "M", min=2
    ) = None,
    allow_equal: switch("--allow-equal", "fuse members although they are the same model") = False,
    processor: option(str | None, "default: the one saved with the first member", "NAME_OR_FOLDER") = None,
) -> None:
    """Make one model of the members."""
    from ..hub.member_heads import trunk_sentence

    folder = Path(members[0]) if len(members) == 1 else None
    names = members if folder is None else [str(path) for path in members_in(folder)]
    configs = [load_config(name) for name in names]
    check_is_new(output)
    if aggregate is not None:
        times_of_spread(aggregate)  # refuses unknown names
        if getattr(configs[0], "num_labels", None) != 1:
            raise ValueError(f"--aggregate is for models of one score, {names[0]} has several outputs: leave it out")
    if folder is not None:
        load_circuits(folder, configs)  # refuses circuits that a card could not describe
    reader = find_processor(names[0], configs[0]) if processor is None else load_processor(processor, configs[0])
    if reader is not None and processor is None:
        check_same_processors(names, configs, reader)
    layers = min(map(number_of_layers, saved_tower_configs(configs[0]).values()))
    if trunk_layers is not None and trunk_layers > layers:
        raise ValueError(f"--trunk-layers is {trunk_layers}, {names[0]} has {layers} layers: pass 0 to {layers}")
    models = [load_model(name) for name in names]
    if average_into is not None:
        models = average_members(models, average_into)
    with written_whole(output) as unfinished:
        hydra = AutoHydra.from_pruned_members(models, [part for part in shared if part], trunk_layers, allow_equal)
        if aggregate is not None:
            hydra.config.aggregate = aggregate
        hydra.save_pretrained(unfinished)
        if reader is not None:
            reader.save_pretrained(unfinished)
        is_plain = not any(hasattr(config, "kept_heads") for config in configs)
        steps = [folder] if folder is not None else [Path(name).parent for name in names]
        record = {"made_of": digest_of_names(names), "fine_tunings": is_plain or any(map(are_fine_tunings, steps))}
        record |= {} if folder is None else made_by(folder)
        if average_into is not None:
            record["averaged"] = len(names) // average_into
        write_atomically(unfinished / FUSE_SETTINGS, json.dumps(record, indent=1) + "\n")
        if folder is not None:
            copy_circuits(folder, unfinished)
    if reader is None:
        print(
            f"note: no processor was found with {names[0]}, so {output} has none: add one with `fuse --processor NAME`, or "
            f"save it there with save_pretrained({str(output)!r})",
            file=sys.stderr,
        )
    once = trunk_sentence(hydra.config)
    print(f"{hydra.num_members} members are one model in {output}{f'; {once}' if once else ''}.")
    print(f"Next: hydra-transformers evaluate {output} --data ...")
