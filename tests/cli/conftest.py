"""Runs commands in this process."""

from collections.abc import Callable

import pytest

from hydra_transformers.cli import main
from hydra_transformers.reports import Report


@pytest.fixture
def no_plots(monkeypatch) -> None:
    """Evaluations draw nothing, which takes longest with tiny models."""
    monkeypatch.setattr(Report, "plot", lambda *_: {})


@pytest.fixture
def fails(capsys) -> Callable[..., str]:
    """Runs a command that the user called wrongly, and returns its one sentence."""

    def run(*words) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        lines = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("note: ")]
        assert len(lines) == 1, lines
        return lines[0]

    return run
