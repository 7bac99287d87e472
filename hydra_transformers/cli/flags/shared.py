"""Arguments that several commands share."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from .choices import PARTS, TEXT_TOKENS


MOST_SEED = 2**31  # numpy takes twice as much, and member i gets the seed plus i


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is no positive number")
    return value


def count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative: pass 0 or more")
    return value


def or_best(number: Callable[[str], int]) -> Callable[[str], int | str]:
    """A number as `number` reads it, or the word "best"."""

    def read(text: str) -> int | str:
        return text if text == "best" else number(text)

    read.__name__ = "number of heads"  # as argparse calls it
    return read


def seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < MOST_SEED:
        raise argparse.ArgumentTypeError(f"{value} is no seed: pass 0 to {MOST_SEED - 1:,}")
    return value


def seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise argparse.ArgumentTypeError(f"{text} is no time to measure: pass 0 or more seconds")
    return value


def share(text: str) -> float:
    """A number between 0 and 1, without them."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is no share between 0 and 1: pass 0.05 for 5 %")
    return value


def learning_rate(text: str) -> float | str:
    """A positive number, or the word "grid"."""
    if text == "grid":
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} is no learning rate: pass positive numbers, or the word grid")
    return value


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE"""
    name, sign, value = text.partition("=")
    if not (name and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


def add_named(parser: argparse.ArgumentParser, flag: str, what: str, help: str, required: bool = False) -> None:
    """`flag NAME=WHAT`, as often as one likes: a list of pairs."""
    parser.add_argument(
        flag, action="append", type=named, default=[], required=required, metavar=f"NAME={what}", help=help
    )


def add_output(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help=what)


def add_data(parser: argparse.ArgumentParser, split: str, has_own_classes: bool = True) -> None:
    """
    has_own_classes: whether the model has classes and rows to choose; `build` takes the data's classes, and parts of its rows
    """
    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        required=True,
        metavar="NAME_OR_FOLDER",
        help='a data set on the Hub ("cifar100", "glue:sst2"), a folder that save_to_disk wrote, a folder of images, csv, '
        "json or parquet files, or one such file",
    )
    group.add_argument("--split", help=f'which split to read, or which part, "train[:1000]" (default: {split})')
    group.add_argument("--limit", type=positive, metavar="N", help="read at most N rows of each set, drawn at random")
    group.add_argument("--image-column", metavar="NAME", help="default: the only column of images")
    group.add_argument("--audio-column", metavar="NAME", help="default: the only column of sounds")
    group.add_argument(
        "--text-column",
        metavar="NAME",
        help='default: "text", "sentence", ... or the only one; "column.field" for a field of one, "premise,hypothesis" for pairs '
        "of texts in two columns",
    )
    group.add_argument(
        "--max-length",
        type=positive,
        metavar="N",
        help=f"tokens that texts are cut to, remembered by what is trained or calibrated (default: {TEXT_TOKENS} in a training, later the tokenizer's)",
    )
    group.add_argument("--label-column", metavar="NAME", help="default: the column whose classes fit the model")
    group.add_argument("--processor", metavar="NAME_OR_FOLDER", help="default: the one saved with the model")
    if not has_own_classes:
        parser.set_defaults(part=None, labels_in_order=False)
        return
    group.add_argument(
        "--part",
        choices=PARTS,
        help="read a random part of the split, the same in every command: a tenth, at most 3,000 rows, each for validation and "
        "test, the rest for training",
    )
    group.add_argument(
        "--labels-in-order", action="store_true", help="take class indices as they are, though class names differ"
    )


def add_training(parser: argparse.ArgumentParser, of: str) -> None:
    """
    of: what trainings --epochs is about
    """
    parser.add_argument(
        "--epochs",
        type=positive,
        metavar="N",
        help=f"passes over the data{of}, at most where a recipe ends early (default: the recipe's; without --recipe by the number of "
        "rows, 1 to 30)",
    )
    parser.add_argument(
        "--report-to",
        default="none",
        metavar="NAME",
        help="where trainings are logged, as Trainer calls it: tensorboard, wandb, ... (default: %(default)s)",
    )


def add_batch_size(parser: argparse.ArgumentParser, default: int) -> None:
    parser.add_argument("--batch-size", type=positive, default=default, metavar="N", help="default: %(default)s")


def add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default=None, help="default: cuda where there is one, otherwise cpu")
