"""`analyse`: which heads see what, who is pruned, and how many can go."""

import argparse
from dataclasses import replace
from typing import Any

import torch
from torch.utils.data import Dataset, Subset
from transformers import PreTrainedConfig

from .._io.files import written_whole
from ..analysis import analyse_heads
from ..analysis.report import REPORT
from ..data.loading import PreparedData
from ..data.rows import is_same_source
from .arguments import (
    check_can_be_learnt_from,
    check_named_once,
    class_prompts,
    device_of,
    read_data,
)
from .folders import check_is_new, check_takes_files, load_config, load_model, load_processor
from .problems import CommandError


def analyse(arguments: argparse.Namespace) -> None:
    check_named_once([name for name, _ in arguments.ood], "--ood")
    check_named_once(arguments.budgets or [], "--budgets")
    check_is_new(arguments.output)
    check_takes_files(arguments.output)
    device = device_of(arguments)
    config = load_config(arguments.model)
    if getattr(config, "num_members", 1) > 1:
        raise CommandError(
            f"{arguments.model} has {config.num_members} members: analyse one, hydra.member(0).save_pretrained(FOLDER)"
        )
    processor = load_processor(arguments.processor or arguments.model, config)
    data = read_data(arguments, config, processor, split=arguments.split, part=arguments.part)
    check_can_be_learnt_from(data, arguments.data, "to choose heads by")
    foreign = {name: _foreign(arguments, config, processor, source, name) for name, source in arguments.ood}
    noisy = None if arguments.noisy is None else read_data(arguments, config, processor, arguments.noisy)
    choosing, judged = halves(data)
    first = next(iter(foreign))
    choosing_ood, foreign[first] = halves(foreign[first])
    model = load_model(arguments.model, device)
    report = analyse_heads(
        model,
        choosing,
        choosing_ood,
        judged,
        foreign,
        noisy_data=noisy,
        budget=arguments.budget,
        budgets=arguments.budgets,
        seconds=arguments.seconds,
        class_prompts=class_prompts(config, processor, data),
        batch_size=arguments.batch_size,
        circuit_options={"mode": arguments.mode},
        tell=lambda step: print(f"{step} ...", flush=True),
    )
    note = (
        f"{arguments.model}: heads chosen on {len(choosing):,} rows of {arguments.data} and {len(choosing_ood):,} of {first}, "
        f"judged on {len(judged):,} other rows and {', '.join(f'{len(rows):,} of {name}' for name, rows in foreign.items())}."
    )
    report = replace(report, notes=[note])
    with written_whole(arguments.output) as folder:
        report.save(folder)
    print(report.sweep.to_markdown())
    print(f"{REPORT}, results.json, circuits and pictures are in {arguments.output}.")


def halves(data: Dataset) -> tuple[Subset, Subset]:
    """Two random halves, the same each time."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0)).tolist()
    middle = len(order) // 2
    return Subset(data, order[:middle]), Subset(data, order[middle:])


def _foreign(
    arguments: argparse.Namespace, config: PreTrainedConfig, processor: Any, source: str, name: str
) -> PreparedData:
    if is_same_source(source, arguments.data):
        raise CommandError(
            f"--ood {name} is the data itself, which cannot be out of its own distribution: pass other data"
        )
    rows = read_data(arguments, config, processor, source, labelled=False)
    if len(rows) < 8:
        raise CommandError(f"--ood {name} gives {len(rows)} rows, too few to choose and to judge by: read more of it")
    return rows
