"""`analyse`: which heads see what, who is pruned, and how many can go."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedConfig

from .._io.files import written_whole
from ..data.loading import PreparedData
from ..data.processors import class_prompts, load_processor
from ..data.rows import is_same_source
from .folders import check_is_new, check_takes_files, load_config, load_model
from .options import (
    DATA,
    BatchSize,
    Device,
    Mode,
    PartOptions,
    check_named_once,
    device_named,
    named,
    option,
)
from .options import seconds as parse_seconds
from .rows import check_can_be_learnt_from


ROWS = 2_000  # of each set, unless told otherwise: an analysis answers thousands of times


@dataclass(kw_only=True)
class FewRows(PartOptions):
    """Options of the data, of which fewer rows are read."""

    limit: Annotated[int, option("read at most N rows of each set, drawn at random", "N", DATA, min=1)] = ROWS


def analyse(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL", help="a fine-tuned classifier, a CLIP or SigLIP model, or a Hydra with one member"
        ),
    ],
    data: FewRows,
    output: Annotated[Path, option("gets report.md, results.json, circuits and pictures; must be new", "DIR")],
    ood: Annotated[
        list[tuple],
        option(
            "out-of-distribution data; may be repeated. Circuits are extracted with one half of the rows of the first",
            "NAME=DATA",
            parser=named,
        ),
    ],
    noisy: Annotated[
        str | None,
        option(
            "labelled noisy data (default: the data itself with Gaussian noise on pixels, or some tokens replaced)",
            "NAME_OR_FOLDER",
        ),
    ] = None,
    budget: Annotated[
        int | None, option("heads that the compared sets cut out (default: a quarter)", "N", min=1)
    ] = None,
    budgets: Annotated[
        list[int] | None, option("numbers of heads to go without (default: up to half)", "N...", min=1)
    ] = None,
    mode: Mode = "exact",
    seconds: Annotated[
        float, option("to measure the time of each pruned model (0: not at all)", parser=parse_seconds)
    ] = 0.0,
    batch_size: BatchSize = 32,
    device: Device = None,
) -> None:
    """Tell which heads see what, who is pruned, how many can go: a folder with a report and pictures."""
    from ..analysis import analyse_heads
    from ..analysis.head_report import REPORT

    check_named_once([name for name, _ in ood], "--ood")
    check_named_once(budgets or [], "--budgets")
    config = load_config(model)
    check_is_new(output)
    check_takes_files(output)
    device = device_named(device)
    if getattr(config, "num_members", 1) > 1:
        raise ValueError(
            f"{model} has {config.num_members} members: analyse one, hydra.member(0).save_pretrained(FOLDER)"
        )
    processor = load_processor(data.processor or model, config)
    rows = data.read(config, processor, split=data.split, part=data.part)
    check_can_be_learnt_from(rows, data.data, "to choose heads by")
    foreign = {name: _foreign(data, config, processor, source, name) for name, source in ood}
    noisy_rows = None if noisy is None else data.read(config, processor, noisy)
    choosing, judged = halves(rows)
    first = next(iter(foreign))
    choosing_ood, foreign[first] = halves(foreign[first])
    report = analyse_heads(
        load_model(model, device),
        choosing,
        choosing_ood,
        judged,
        foreign,
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
        f"{len(judged):,} other rows and {', '.join(f'{len(each):,} of {name}' for name, each in foreign.items())}."
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


def _foreign(data: FewRows, config: PreTrainedConfig, processor: Any, source: str, name: str) -> PreparedData:
    if is_same_source(source, data.data):
        raise ValueError(
            f"--ood {name} is the data itself, which cannot be out of its own distribution: pass other data"
        )
    rows = data.read(config, processor, source, labelled=False)
    if len(rows) < 8:
        raise ValueError(f"--ood {name} gives {len(rows)} rows, too few to choose and to judge by: read more of it")
    return rows
