"""Options: how they are declared and parsed, and those that several commands share.

`command` makes a command of a function.
"""

import inspect
import math
import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer


if TYPE_CHECKING:
    from ..data.loading import PreparedData

MAX_SEED = 2**31 - 1  # numpy takes twice as much, and member i gets the seed plus i
# Splits by purpose: where the data has no split of this name, a random tenth of the first one.
PURPOSES = ("training", "validation", "test")


# Parsers of values


def number(fits: Callable[[Any], bool], problem: str, kind: Callable[[str], Any] = float) -> Callable[[str], Any]:
    """Return a parser of finite numbers that fit.

    problem: why another value is refused
    """

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise typer.BadParameter(f"{text} is {problem}")
        return value

    return read


def _count_or_share(text: str) -> int | float:
    """Read a whole number as one, for 1 and 1.0 differ: a layer, or all of them."""
    if str(text).strip("+-").isdigit():  # a default is not a text
        return int(text)
    return float(text)


duration = number(lambda value: value >= 0, "not a time: pass 0 or more")
layers_or_share = number(
    lambda value: value >= 0 and (isinstance(value, int) or value < 1),
    "neither a number of layers nor a share of them below 1, such as 0.75",
    _count_or_share,
)
share = number(lambda value: 0 < value < 1, "not a share between 0 and 1: pass 0.05 for 5 %")
positive = number(lambda value: value > 0, "not a positive number")


def model_name(text: str) -> str:
    """Return a folder or Hub name; raise for a file, before anything is loaded."""
    if os.path.isfile(text):
        raise typer.BadParameter(f"{text} is a file: pass the folder or Hub name of a model")
    return text


def named(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE: put a name and = before it")
    return name, value


# Declarations


def option(
    kind: Any,
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    flag: str | None = None,
    **settings: Any,
) -> Any:
    """Annotate a parameter that becomes --its-name, or `flag`."""
    names = [] if flag is None else [flag]
    return Annotated[kind, typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel, **settings)]


def switch(flag: str, help: str) -> Any:
    """Annotate a flag without a value, and without the --no-flag that typer would add."""
    return Annotated[bool, typer.Option(flag, help=help)]


def argument(kind: Any, metavar: str, help: str, **settings: Any) -> Any:
    """Annotate a parameter that is given without a flag."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=help, **settings)]


DATA_HELP = (
    'a data set on the Hub ("cifar100", "glue:sst2"), a folder of images, of csv, json or parquet files or that '
    "save_to_disk wrote, or one such file"
)
ANY_MODEL = "a Hydra, or any classifier, CLIP or SigLIP model, by folder or Hub name"
ModelArgument = argument(str, "MODEL", ANY_MODEL, parser=model_name)
BatchSize = option(int, "rows per batch", "N", min=1)
MonitorFile = option(Path | None, "counts whether promises are kept, for `watch`; continued if it exists", "FILE")
Seed = option(int, "seed of everything that is random", min=0, max=MAX_SEED)
Column = option(list[str] | None, "the column of inputs (default: the only one); twice for pairs of texts", "NAME")


def data_name(text: str) -> str:
    """Return a folder, file or Hub name; raise, before anything is loaded, for a missing file."""
    if text.endswith((".csv", ".tsv", ".json", ".jsonl", ".parquet")) and not Path(text).exists():
        raise FileNotFoundError(f"there is no folder or file {text}")
    return text


@dataclass(kw_only=True)
class DataOptions:
    """Which rows and columns to read."""

    data: option(
        str,
        DATA_HELP,
        "NAME_OR_FOLDER",
        parser=data_name,
    )
    split: option(
        str | None,
        'a split, or a part of one, "train[:1000]"; validation and test are also the tenths that `finetune` splits '
        "off where the data has no such splits (default: the first of validation, test and train)",
    ) = None
    limit: option(int | None, "read at most N rows of each set, drawn at random", "N", min=1) = None
    column: Column = None
    label: option(str | None, "the column of labels (default: the only one that fits)", "NAME") = None
    label_separator: option(str | None, 'between several labels in one cell, such as "|"', "TEXT") = None

    def read(self, config: Any, processor: Any, name: str | None = None, labelled: bool = True) -> "PreparedData":
        """Return the rows of --data and its --split, prepared for a model; print what was found.

        Args:
            config: the model's, or what is known of it (`ModelInfo`).
            processor: the model's.
            name (`str`, *optional*): another data set, which --split does not mean.
            labelled (`bool`, defaults to `True`): whether labels are needed.
        """
        from .._io.access import access_to
        from ..data.loading import load_data

        name = name or self.data
        is_other = name != self.data
        settings: dict[str, Any] = {"limit": self.limit, "labelled": labelled, "column": self.column or None}
        if not is_other:
            by = "part" if self.split in PURPOSES else "split"
            settings[by] = self.split
        if not is_other or labelled:
            settings |= {"label": self.label, "label_separator": self.label_separator}
        with access_to(name, "data set"):
            rows = load_data(name, config, processor=processor, **settings)
        print(*rows.notes, sep="\n", flush=True)
        return rows

    def read_groups(
        self, config: Any, processor: Any, groups: dict[str, list[tuple[str, str]]]
    ) -> dict[str, dict[str, "PreparedData"]] | None:
        """Return sets of out-of-distribution data by group and name, without labels.

        None where there are none.

        Args:
            config, processor: as for `read`.
            groups (`dict`): by group, the name and the source of each set.
        """
        for group, sets in groups.items():
            if len(dict(sets)) < len(sets):
                raise ValueError(f"--{group} has a name twice: name each set once")
        rows = {}
        for group, sets in groups.items():
            if sets:
                rows[group] = {name: self.read(config, processor, source, labelled=False) for name, source in sets}
        return rows or None


def typed(**options: Any) -> str:
    """Return options as they are typed; without those that are None."""
    words = []
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        values = value if isinstance(value, list) else [value]
        words += [f"{flag} {shlex.quote(str(each))}" for each in values if each is not None]
    return " ".join(words)


def best_device() -> str:
    """Return "cuda" where there is a GPU, else "cpu"."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


# From functions to commands


def command(function: Callable) -> Callable:
    """Turn dataclasses among a function's parameters into options, one per field."""
    groups: dict[str, type] = {}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += inspect.signature(parameter.annotation).parameters.values()
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(function)
    def run(**values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run
