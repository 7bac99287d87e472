"""Bars are for terminals, and for what takes more than five seconds; logs get lines from the tenth second on."""

import io

import pytest

from hydra_transformers._io import progress
from hydra_transformers._io.progress import progress_bar, timed_step


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


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass when a test says so."""

    class Clock:
        now = 0.0

        def monotonic(self):
            return self.now

    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


def test_a_log_gets_lines_at_growing_distances(clock, monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    with progress_bar(1000, "predict", "row", initial=900) as bar:
        for _ in range(100):
            clock.now += 1
            bar.update()
    assert pipe.getvalue().splitlines() == [
        "predict: 910 of 1,000 rows, 2 minutes left",
        "predict: 920 of 1,000 rows, 1 minute left",
        "predict: 940 of 1,000 rows, 1 minute left",
        "predict: 980 of 1,000 rows, 20 seconds left",
        "predict: 1,000 rows in 2 minutes",
    ]
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    for enabled, seconds in ((False, 100), (True, 3)):
        with progress_bar(3, "rows", "batch", enabled) as bar:
            for _ in range(3):
                clock.now += seconds
                bar.update()
                bar.set_postfix(score=1)
        assert pipe.getvalue() == ""
    with progress_bar(None, "read", "batch") as bar:
        clock.now += 11
        bar.update()
    assert pipe.getvalue().endswith("read: 1 batch after 11 seconds\nread: 1 batch in 11 seconds\n")
    with progress_bar(None, "read", "batch") as bar:
        clock.now += 11
        bar.update(2)
    assert pipe.getvalue().endswith("read: 2 batches in 11 seconds\n")


def test_a_step_of_more_than_ten_seconds_is_timed(clock, capsys):
    for seconds in (9, 75):
        with timed_step("graph recorded"):
            clock.now += seconds
    assert capsys.readouterr().err == "graph recorded: 1 minute\n"
