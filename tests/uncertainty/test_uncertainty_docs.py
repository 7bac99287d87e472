"""The examples people read must run."""

import doctest
import importlib
import re
from pathlib import Path

import pytest


PAGE = Path(__file__).parents[2] / "docs" / "uncertainty.md"
MODULES = ("decomposition", "metrics", "ood", "streaming", "temperature")


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_are_true(module):
    results = doctest.testmod(importlib.import_module(f"hydra_transformers.uncertainty.{module}"))
    assert results.attempted > 0 and results.failed == 0


def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "metrics")
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    names = {}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
