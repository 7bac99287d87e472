"""The examples of docstrings and pages run."""

import doctest
import importlib

import pytest

from tests.pages import run_python_blocks


MODULES = (
    "uncertainty.abstention",
    "uncertainty.audits",
    "uncertainty.calibration_summary",
    "uncertainty.decomposition",
    "uncertainty.detectors",
    "uncertainty.metrics",
    "uncertainty.multi_label",
    "uncertainty.regression",
    "uncertainty.rewards",
    "uncertainty.temperature",
    "reports.table",
)


@pytest.mark.parametrize("module", MODULES)
def test_docstring_examples_are_true(module):
    results = doctest.testmod(importlib.import_module(f"hydra_transformers.{module}"))
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.slow
def test_the_python_blocks_of_the_page_run_in_order(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "metrics")
    run_python_blocks("docs/uncertainty.md", at_least=8)
