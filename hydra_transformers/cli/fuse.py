"""`fuse`: checkpoints of one pre-trained model, or pruned members, become one model."""

import sys
from pathlib import Path
from typing import Any

from .._io.records import check_is_new
from .folders import read_members
from .options import argument, layers_or_share, option


def fuse(
    members: argument(
        list[str],
        "DIR_OR_MODEL",
        "fine-tuned checkpoints of one pre-trained model, by folder or Hub name; or the folder of `prune` or "
        "`finetune` with its members",
    ),
    output: option(Path, "gets the Hydra with its code and processor, ready for the Hub", "DIR"),
    trunk_layers: option(
        Any,
        "merge the first N layers whole, so that they run once for all members: a number, or a share such as 0.75 "
        "(default: those that are equal in all members, which changes no prediction)",
        "N",
        parser=layers_or_share,
    ) = None,
) -> None:
    """Make one model of several checkpoints or members."""
    from .._io.files import written_whole
    from ..hub.member_heads import copy_circuits, load_circuits, trunk_sentence
    from ..models.auto import AutoHydra
    from ..serving.saved_models import load_model

    check_is_new(output)
    names, configs, processor = read_members(members)
    folder = None
    if len(members) == 1:
        folder = Path(members[0])
        load_circuits(folder, configs)  # raises for circuits that a card could not describe

    models = [load_model(name) for name in names]
    hydra = AutoHydra.from_pruned_members(models, trunk_layers=trunk_layers)
    with written_whole(output) as unfinished:
        hydra.save_pretrained(unfinished)
        if processor is not None:
            processor.save_pretrained(unfinished)
        if folder is not None:
            copy_circuits(folder, unfinished)
    if processor is None:
        print(f"note: {names[0]} has no processor, so {output} has none: save one there", file=sys.stderr)
    result = f"{hydra.num_members} members are one model in {output}"
    trunk = trunk_sentence(hydra.config)
    if trunk:
        result += f"; {trunk}"
    print(f"{result}.")
    if len(names) > 1:
        print(f"Fusing can cost accuracy: check it with hydra-transformers compare {' '.join(members)} --data ...")
    print(f"Next: hydra-transformers calibrate {output} --data ... --output ...")
