"""`analyse`: what heads detect, which are pruned, and how many can go."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.utils.data import Dataset, Subset

from .._io.files import written_whole
from ..data.loading import check_has_variety
from ..data.processors import class_prompts, load_processor
from ..data.rows import is_same_source
from . import flags
from .folders import check_is_new, load_config, load_model
from .options import argument, check_named_once, device_named, duration, named, option


ROWS = 2_000  # fewer than elsewhere, because an analysis runs thousands of times over them


@dataclass(kw_only=True)
class FewRows(flags.PartOptions):
    limit: option(int, "read at most N rows of each set, drawn at random", "N", flags.DATA, min=1) = ROWS


def analyse(
    model: argument(str, "MODEL", "a fine-tuned classifier, a CLIP or SigLIP model, or a Hydra with one member"),
    data: FewRows,
    output: option(Path, "gets report.md, results.json, circuits and pictures; must be new", "DIR"),
    ood: option(
        list[tuple],
        "out-of-distribution data; may be repeated. Circuits are extracted with half of the first",
        "NAME=DATA",
        parser=named,
    ),
    noisy: option(
        str | None, "labelled noisy data (default: the data with noise on pixels or tokens)", "NAME_OR_FOLDER"
    ) = None,
    budget: option(int | None, "heads that the compared sets remove (default: a quarter)", "N", min=1) = None,
    budgets: option(
        list[int] | None, "numbers of heads to remove in turn (default: up to half)", "N...", min=1
    ) = None,
    mode: flags.Mode = "exact",
    seconds: option(float, "to time each pruned model (0: not at all)", parser=duration) = 0.0,
    batch_size: flags.BatchSize = 32,
    device: flags.Device = None,
) -> None:
    """Find out which heads detect what, which are pruned and how many can go: a folder with a report and pictures."""
    from ..analysis import analyse_heads
    from ..analysis.head_report import REPORT

    check_named_once([name for name, _ in ood], "--ood")
    check_named_once(budgets or [], "--budgets")
    config = load_config(model)
    check_is_new(output)
    device = device_named(device)
    if getattr(config, "num_members", 1) > 1:
        raise ValueError(
            f"{model} has {config.num_members} members: analyse one, hydra.member(0).save_pretrained(FOLDER)"
        )
    processor = load_processor(data.processor or model, config)
    rows = data.read_part(config, processor)
    check_has_variety(rows, data.data, "to choose heads by")
    ood_rows = {}
    for name, source in ood:
        if is_same_source(source, data.data):
            raise ValueError(f"--ood {name} is the data itself: pass other data")
        ood_rows[name] = data.read(config, processor, source, labelled=False)
        if len(ood_rows[name]) < 8:
            raise ValueError(
                f"--ood {name} gives {len(ood_rows[name])} rows, too few for both halves: read more of it"
            )
    noisy_rows = None if noisy is None else data.read(config, processor, noisy)
    choosing, test = halves(rows)
    first = next(iter(ood_rows))
    choosing_ood, ood_rows[first] = halves(ood_rows[first])
    report = analyse_heads(
        load_model(model, device),
        choosing,
        choosing_ood,
        test,
        ood_rows,
        noisy_data=noisy_rows,
        budget=budget,
        budgets=budgets or None,
        seconds=seconds,
        class_prompts=class_prompts(config, processor, rows.class_names),
        batch_size=batch_size,
        circuit_options={"mode": mode},
        tell=lambda step: print(f"{step} ...", flush=True),
    )
    note = (
        f"{model}: heads chosen on {len(choosing):,} rows of {data.data} and {len(choosing_ood):,} of {first}, judged on "
        f"{len(test):,} other rows and {', '.join(f'{len(each):,} of {name}' for name, each in ood_rows.items())}."
    )
    report = replace(report, notes=[note])
    with written_whole(output) as folder:
        report.save(folder)
    print(report.sweep.to_markdown())
    print(f"{REPORT}, results.json, circuits and pictures are in {output}.")


def halves(data: Dataset) -> tuple[Subset, Subset]:
    """Two random halves, the same each time."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    middle = len(order) // 2
    return Subset(data, order[:middle]), Subset(data, order[middle:])
