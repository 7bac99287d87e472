"""The examples of docs/app.md run, and what it says is so."""

import re

import pytest

from hydra_transformers.cli import main
from hydra_transformers.serving.page_inputs import FORMATS, Limits
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/app.md"


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks(PAGE, at_least=3)
    assert "http://127.0.0.1:" in capsys.readouterr().out and len(names["answer"]["members"]) == 3
    assert (tmp_path / "my-space" / "app.py").exists()


def test_the_page_names_flags_that_exist_and_limits_as_they_are(capsys):
    for command in ("app", "push"):
        assert main([command, "--help"]) == 0
    flags, text = re.compile(r"--[a-z]+(?:-[a-z]+)*"), (ROOT / PAGE).read_text()
    assert set(flags.findall(text)) <= set(flags.findall(capsys.readouterr().out))
    assert f"--max-megabytes {Limits().megabytes:g}" in text and f"--max-characters {Limits().characters}" in text
    assert f"{Limits().pixels // 1_000_000} million pixels" in text and all(name in text for name in FORMATS)
