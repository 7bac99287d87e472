"""What people read and run: the page, the docstrings' examples, the benchmark."""

import doctest
import json
import runpy
import sys
import warnings

import pytest

from hydra_transformers.pruning import diversity
from tests.pages import ROOT, run_python_blocks


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random models score at chance
        run_python_blocks("docs/pruning.md", at_least=7)


def test_docstring_examples_are_true():
    results = doctest.testmod(diversity)
    assert results.attempted == 3 and results.failed == 0


@pytest.mark.slow
def test_the_benchmark_finds_the_ranking_of_the_naive_loop(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["circuit_extraction.py", "--smallest", "--output", str(tmp_path / "result")])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / "circuit_extraction.py"), run_name="__main__")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranking_check"]["agree"]
    assert all(state["exact"]["same_choice_as_naive"] for state in result["states"])
    assert (tmp_path / "result.md").read_text() in capsys.readouterr().out
    assert set(result["machine"]) == {"machine", "versions", "date", "commit"}
