"""What several commands make of their arguments."""

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.integrations import get_available_reporting_integrations

from ..data.loading import PreparedData, load_data
from ..data.rows import PREFERRED_SPLITS, DataSource
from ..models.auto import HYDRA_CLASSES, head_of, is_zero_shot
from .problems import CommandError, access_to


def check_named_once(names: Sequence, flag: str) -> None:
    """Refuses what would count once, or stand for two things."""
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise CommandError(f"{flag} has {twice[0]} twice: name each once")


def check_training(arguments: argparse.Namespace) -> None:
    """Refuses two lengths of a training, and reports to what is not installed."""
    if arguments.epochs is not None and arguments.max_steps is not None:
        raise CommandError("--epochs and --max-steps are both lengths of a training: pass one of them")
    known = get_available_reporting_integrations()
    if arguments.report_to not in ("none", "all", *known):
        raise CommandError(
            f"--report-to {arguments.report_to} is unknown or not installed: install it, or pass one of "
            f"{', '.join(['none', *known])}"
        )


def device_of(arguments: argparse.Namespace) -> str:
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"the device {device} is not there: pass --device cpu") from error
    return device


def read_data(
    arguments: argparse.Namespace,
    config: PreTrainedConfig,
    processor: Any,
    name: str | None = None,
    split: str | None = None,
    labelled: bool = True,
    prefer: tuple[str, ...] = PREFERRED_SPLITS,
    is_told: bool = True,
    part: str | None = None,
) -> PreparedData:
    """The rows the arguments name, prepared for a model; says what was found where `is_told`."""
    source = source_of(arguments, name, split or (prefer if part is None else None), part)
    with access_to(source.name, "data set"):
        data = load_data(**vars(source), model=config, processor=processor, labelled=labelled)
    if is_told:
        for note in data.notes:
            print(note, flush=True)
    return data


def source_of(
    arguments: argparse.Namespace,
    name: str | None = None,
    split: str | Sequence[str] | None = None,
    part: str | None = None,
) -> DataSource:
    return DataSource(
        name or arguments.data,
        split=split,
        part=part,
        limit=arguments.limit,
        image=arguments.image_column,
        audio=arguments.audio_column,
        text=arguments.text_column,
        max_length=arguments.max_length,
        label=arguments.label_column,
        labels_in_order=arguments.labels_in_order,
    )


def check_can_be_learnt_from(data: PreparedData, name: str, purpose: str, by_classes: bool = True) -> None:
    """Refuses rows among which nothing can be told apart."""
    if len(data) < 2:
        raise CommandError(f"{name} gives 1 row, too few {purpose}: read more of it")
    if by_classes and len(set(data.labels)) < 2:
        raise CommandError(
            f"all {len(data):,} rows of {name} have the same label, so there is nothing {purpose}: where the rows are "
            "sorted by class, read all of them and draw with --limit"
        )


def class_prompts(config: PreTrainedConfig, processor: Any, data: PreparedData) -> dict | None:
    """For two towers the tokenized prompts of the data's classes; for classifiers nothing."""
    if not is_zero_shot(config):
        return None
    return prompts_for(config, processor, data.class_names)


def prompts_for(config: PreTrainedConfig, processor: Any, class_names: Sequence[str]) -> dict:
    """What a model of two towers reads of classes."""
    prompts = [f"A photo of a {name}." for name in class_names]
    head = head_of(config)
    length = {"padding": True}
    if HYDRA_CLASSES.get(head, head).reads_padding:
        length = {"padding": "max_length", "max_length": config.text_config.max_position_embeddings}
    return dict(processor(text=prompts, truncation=True, return_tensors="pt", **length))
