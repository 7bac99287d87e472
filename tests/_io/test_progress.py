"""Bars are for terminals, and for what takes more than five seconds."""

import io

from hydra_transformers._io import progress
from hydra_transformers._io.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self):
        return True


def open_terminal(monkeypatch):
    """In the test itself: pytest puts its own stderr in place before."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    return terminal


def read(enabled=True):
    with progress_bar(3, "rows", "batch", enabled) as bar:
        for _ in range(3):
            bar.update()


def test_a_bar_is_shown_on_a_terminal_after_five_seconds_and_nowhere_else(monkeypatch):
    terminal = open_terminal(monkeypatch)
    read()
    assert terminal.getvalue().strip() == "", "it took no five seconds"
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    read()
    assert "rows:   0%" in terminal.getvalue() and "0/3" in terminal.getvalue()
    shown = terminal.getvalue()
    read(enabled=False)
    assert terminal.getvalue() == shown
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    read()
    assert pipe.getvalue() == ""
