"""Runs command lines in this process, or only reads them."""

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
