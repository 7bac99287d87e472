"""The examples of docs/baselines.md run."""

import pytest

from hydra_transformers import baselines
from tests.pages import ROOT, run_python_blocks


PAGE = "docs/baselines.md"


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks(PAGE, at_least=11)
    assert names["output"].member_logits.shape == (4, 2, 3)
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names["models"])


def test_the_page_shows_every_public_name():
    assert all(name in (ROOT / PAGE).read_text() for name in baselines.__all__)
