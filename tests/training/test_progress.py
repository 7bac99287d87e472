"""Bars are for terminals, and for what takes more than five seconds."""

import io

from transformers.utils import logging

from hydra_transformers._io import progress
from hydra_transformers._io.progress import CountedBatches, progress_bar
from hydra_transformers.training import finetune_members, recipe
from tests.training.tiny import tiny_dataset, tiny_model


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
        assert list(CountedBatches([1, 2, 3], bar)) == [1, 2, 3]


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


def test_every_training_has_a_bar_and_a_line_for_each_validation_however_quiet_the_libraries(
    monkeypatch, tmp_path, capsys
):
    """As on the command line, where Transformers' own bars are off."""
    terminal = open_terminal(monkeypatch)
    monkeypatch.setattr(progress, "SECONDS_BEFORE_A_BAR", 0.0)
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    rows, model = tiny_dataset("vit"), tiny_model("vit", "backbone")
    settings = {"max_steps": 2, "use_cpu": True, "report_to": "none"}
    try:
        finetune_members([model], recipe("tune-images"), rows, rows, tmp_path / "shown", **settings)
        assert "member-0, learning rate 5e-05" in terminal.getvalue() and "/2 [" in terminal.getvalue()
        said = capsys.readouterr().out
        assert "member-0, learning rate 5e-05: step 2 of 2, validation loss" in said and "{'eval_loss'" not in said
        shown = terminal.getvalue().count("member-0")
        finetune_members([model], recipe("tune-images"), rows, rows, tmp_path / "silent", progress=False, **settings)
        assert (terminal.getvalue().count("member-0"), capsys.readouterr().out) == (shown, "")
    finally:
        logging.set_verbosity(verbosity)
