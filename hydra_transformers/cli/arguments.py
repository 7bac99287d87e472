"""Arguments that several commands share."""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig

from ..data import DataSource, PreparedData, prepare_data
from .problems import CommandError, access_to


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is no positive number")
    return value


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE"""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help=what)


def add_data(parser: argparse.ArgumentParser, split: str) -> None:
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=True,
        metavar="NAME_OR_FOLDER",
        help='a data set on the Hub ("cifar100", "glue:sst2"), a folder that save_to_disk wrote, a folder of images, csv, '
        "json or parquet files, or one such file",
    )
    group.add_argument("--split", help=f"which split to read (default: {split})")
    group.add_argument("--limit", type=positive, metavar="N", help="read at most N rows of each set, drawn at random")
    group.add_argument("--image-column", metavar="NAME", help="default: the only column of images")
    group.add_argument(
        "--text-column",
        metavar="NAME",
        help='default: "text", "sentence", ... or the only one; "column.field" for a field of one',
    )
    group.add_argument("--label-column", metavar="NAME", help="default: the column whose classes fit the model")
    group.add_argument(
        "--labels-in-order", action="store_true", help="take class indices as they are, though class names differ"
    )
    group.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")


def add_batch_size(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--batch-size", type=positive, default=default, metavar="N", help="default: %(default)s")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="default: cuda where there is one, otherwise cpu")


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
    prefer: tuple[str, ...] = ("validation", "test", "train"),
) -> PreparedData:
    """The rows the arguments name, prepared for a model; says what was found."""
    source = DataSource(
        name or arguments.data,
        split=split,
        limit=arguments.limit,
        image_column=arguments.image_column,
        text_column=arguments.text_column,
        label_column=arguments.label_column,
        labels_in_order=arguments.labels_in_order,
    )
    with access_to(source.name, "data set"):
        data = prepare_data(source, config, processor, labelled, prefer)
    for note in data.notes:
        print(note, flush=True)
    return data


def class_prompts(config: PreTrainedConfig, processor: Any, data: PreparedData) -> dict | None:
    """For CLIP the tokenized prompts of the data's classes; for classifiers nothing."""
    if not hasattr(config, "vision_config"):
        return None
    prompts = [f"A photo of a {name}." for name in data.class_names]
    return dict(processor(text=prompts, padding=True, truncation=True, return_tensors="pt"))
