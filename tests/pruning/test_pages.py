"""What people read and run: the page, the docstrings' examples, the benchmark."""

import doctest
import json
import re
import runpy
import sys
import warnings
from pathlib import Path

from hydra_transformers.pruning import diversity


ROOT = Path(__file__).parents[2]


def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "pruning.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 7
    names = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # random models score at chance
        for number, block in enumerate(blocks):
            exec(compile(block, f"{page.name}, block {number}", "exec"), names)


def test_docstring_examples_are_true():
    results = doctest.testmod(diversity)
    assert results.attempted == 2 and results.failed == 0


def test_the_benchmark_finds_the_ranking_of_the_naive_loop(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        sys, "argv", ["circuit_extraction.py", "--preset", "smoke", "--output", str(tmp_path / "result")]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        runpy.run_path(str(ROOT / "benchmarks" / "circuit_extraction.py"), run_name="__main__")
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["ranking_check"]["agree"]
    assert all(state["exact"]["same_choice_as_naive"] for state in result["states"])
    assert (tmp_path / "result.md").read_text() in capsys.readouterr().out
