"""How options are declared, parsed and checked, and the decorator that makes a command of a function."""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, Literal, get_type_hints

import torch
import typer


# Options that take several values in a row, `--labels cat dog`; the others of several values are repeated.
SEVERAL_VALUES = {"--batch-sizes", "--budgets", "--labels", "--learning-rates", "--objectives", "--shared", "--to"}


# Parsers of values


def number(
    fits: Callable[[Any], bool], problem: str, kind: Callable[[str], Any] = float, word: str | None = None
) -> Callable[[str], Any]:
    """A parser of finite numbers that fit. problem: why another value is refused; word: is accepted as well"""

    def read(text: str) -> Any:
        if text == word:
            return text
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and fits(value)):
            raise typer.BadParameter(f"{text} is {problem}")
        return value

    return read


positive_or_best = number(lambda value: value > 0, "neither a positive number nor best", int, "best")
count_or_best = number(lambda value: value >= 0, "neither a number of heads nor best", int, "best")
duration = number(lambda value: value >= 0, "not a time: pass 0 or more")
minutes = number(lambda value: value > 0, "not a time: pass more than 0 minutes")
megabytes = number(lambda value: value > 0, "not a size: pass a positive number")
layers_or_share = number(
    lambda value: value >= 0 and (isinstance(value, int) or value < 1),
    "neither a number of layers nor a share of them below 1, such as 0.75",
    lambda text: int(text) if str(text).strip("+-").isdigit() else float(text),  # a default is no text
)
share = number(lambda value: 0 < value < 1, "not a share between 0 and 1: pass 0.05 for 5 %")
positive = number(lambda value: value > 0, "not a positive number")
learning_rate = number(lambda value: value > 0, "not a learning rate: pass positive numbers, or grid", word="grid")


def one_of(names: Sequence[str]) -> Callable[[str], str]:
    """A parser for options that take several of `names`; typer takes `choice` for a single one only."""

    def read(text: str) -> str:
        if text not in names:
            raise typer.BadParameter(f"{text!r} is not one of {', '.join(filter(None, names))}")
        return text

    return read


def named(text: str) -> tuple[str, str]:
    """NAME=VALUE"""
    name, _, value = text.partition("=")
    if not (name and value):
        raise typer.BadParameter(f"{text!r} is not NAME=VALUE")
    return name, value


# Declarations


def option(kind: Any, help: str, metavar: str | None = None, panel: str | None = None, **settings: Any) -> Any:
    """The annotation of a parameter that becomes --its-name."""
    return Annotated[kind, typer.Option(help=help, metavar=metavar, rich_help_panel=panel, **settings)]


def switch(flag: str, help: str, panel: str | None = None) -> Any:
    """The annotation of a flag without a value, and without the --no-flag that typer would add."""
    return Annotated[bool, typer.Option(flag, help=help, rich_help_panel=panel)]


def argument(kind: Any, metavar: str, help: str) -> Any:
    """The annotation of a parameter that is given without a flag."""
    return Annotated[kind, typer.Argument(metavar=metavar, help=help)]


def choice(names: Sequence) -> Any:
    """The type of an option that takes one of `names`."""
    return Literal[tuple(names)]


def device_named(device: str | None) -> str:
    """The requested device, or the best there is."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {device} here: pass --device cpu") from error
    return device


def check_named_once(names: Sequence, flag: str) -> None:
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise ValueError(f"{flag} has {twice[0]} twice: name each once")


# From functions to commands


def command(function: Callable) -> Callable:
    """Turns dataclasses among a function's parameters into options, one per field, and adds --debug, which `main` reads."""
    groups: dict[str, type] = {}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            hints = get_type_hints(parameter.annotation, include_extras=True)
            parameters += [
                _keyword(field.name, hints[field.name], field.default) for field in fields(parameter.annotation)
            ]
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    debug = switch("--debug", "show the whole trace when something goes wrong")
    parameters.append(_keyword("debug", debug, False))

    @wraps(function)
    def run(debug: bool = False, **values: Any) -> None:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        function(**values)

    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def repeat_flags(words: Sequence[str]) -> list[str]:
    """`--labels cat dog` as typer takes it: `--labels cat --labels dog`; an empty list is `--labels ""`."""
    words, found = list(words), []
    while words:
        word = words.pop(0)
        if word == "--":
            return [*found, word, *words]
        values = []
        while word in SEVERAL_VALUES and words and not (words[0].startswith("-") and len(words[0]) > 1):
            values.append(words.pop(0))
        if values:
            found += [part for value in values for part in (word, value)]
        else:
            found += [word, ""] if word == "--shared" else [word]
    return found
