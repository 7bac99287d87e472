"""`prune`: from one model, or several checkpoints, to members without some of their heads."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .._io.records import claim
from .folders import PRUNE_SETTINGS, models_named, read_members
from .options import DataOptions, Seed, argument, best_device, layers_or_share, option


if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prune(
    models: argument(
        list[str],
        "MODEL",
        "a classifier or a CLIP or SigLIP model, by Hub name or folder; or several checkpoints of one pre-trained "
        "model: then each makes one member, by its own circuit",
    ),
    data: DataOptions,
    output: option(Path, "gets member-0, member-1, ... and the circuits; run again to continue after a stop", "DIR"),
    method: option(
        Literal["circuits", "taylor"] | None,
        "how heads are chosen: by circuits, or by Taylor scores, which need no --ood-data (default: circuits with "
        "--ood-data, else taylor)",
    ) = None,
    members: option(int | None, "how many members (default: 3)", "M", min=1) = None,
    budget: option(int | None, "circuits: heads that each member loses (default: a sixth of them)", "N", min=1) = None,
    heads_per_layer: option(
        int | None, "taylor: heads that each layer keeps (default: two thirds of them)", "N", min=1
    ) = None,
    trunk_layers: option(
        float,
        "keep all heads of the first N layers, or of a share such as 0.75, which fused members can then share",
        "N",
        parser=layers_or_share,
    ) = 0,
    ood_data: option(str | None, "out-of-distribution data, to choose heads by, too", "NAME_OR_FOLDER") = None,
    seed: Seed = 0,
) -> None:
    """Make members without some heads, from copies of one model or from several checkpoints."""
    from .._io.processes import on_one_process
    from ..data.loading import check_has_variety
    from ..data.processors import class_prompts, load_processor
    from ..pruning.members import choose_method, make_members
    from ..serving.saved_models import load_model

    # What is asked for, which the folder is claimed with.
    names = models_named(models)
    count = members
    if count is None:
        count = len(names) if len(names) > 1 else 3
    method = choose_method(method, ood_data is not None, budget=budget, heads_per_layer=heads_per_layer)
    settings = {
        "model": names,
        "members": count,
        "budget": budget,
        "trunk_layers": trunk_layers,
        "heads_per_layer": heads_per_layer,
        "method": None if method == "circuits" else method,  # folders of earlier versions have no method
        "ood_data": ood_data,
        "seed": seed,
        **vars(data),
    }
    _, configs, processor = read_members(names)
    config = configs[0]
    if processor is None:
        processor = load_processor(names[0], config)
    on_one_process(lambda: claim(output, PRUNE_SETTINGS, settings))
    if all((output / f"member-{index}" / "config.json").exists() for index in range(count)):
        print(f"{output} is finished already.")
        return

    # The rows to choose heads by.
    rows = data.read(config, processor)
    check_has_variety(rows, data.data, "to choose heads by")
    ood_rows = None
    if ood_data is not None:
        ood_rows = data.read(config, processor, ood_data, labelled=False)

    # The members.
    pruned = make_members(
        [load_model(name, best_device()) for name in names],
        rows,
        ood_rows,
        method=method,
        num_members=members,
        budget=budget,
        heads_per_layer=heads_per_layer,
        trunk_layers=trunk_layers,
        seed=seed,
        class_prompts=class_prompts(config, processor, rows.class_names),
        folder=output,
    )

    on_one_process(lambda: _save(pruned, processor, output))
    print(f"{len(pruned)} members are in {output}.")
    print(f"Next: hydra-transformers finetune {output} --data ... --output ..., or hydra-transformers fuse {output}")


def _save(members: "Sequence[PreTrainedModel]", processor: Any, output: Path) -> None:
    """Write each member, with the processor, into a folder of its own."""
    from .._io.files import written_whole

    for index, member in enumerate(members):
        with written_whole(output / f"member-{index}") as unfinished:
            member.save_pretrained(unfinished)
            processor.save_pretrained(unfinished)
