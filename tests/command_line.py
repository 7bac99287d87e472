"""Runs command lines in this process, or only reads them."""

from dataclasses import fields
from typing import Any

from hydra_transformers.cli import main, runner


def call(*words) -> int:
    """The exit code of a command."""
    return main([str(word) for word in words])


def run(*words) -> None:
    assert call(*words) == 0


def parsed(words: list[str]) -> dict[str, Any]:
    """The values of a command's arguments and options, by name."""
    return runner().commands[words[0]].make_context(words[0], words[1:]).params


def options_of(group: type, words: list[str]) -> Any:
    """A group of a command's options."""
    values = parsed(words)
    return group(**{field.name: values[field.name] for field in fields(group)})
