"""The benchmarks of data sets with many rows run in their smallest form, and the page has their figures."""

import json
import sys

import cost_per_million
import predict_workers
import pytest

from tests.pages import ROOT


def test_the_page_has_the_figures_of_the_results():
    page = (ROOT / "docs" / "scaling.md").read_text()
    reports = sorted((ROOT / "benchmarks" / "results").glob("cost_per_million_*.json"))
    lines = [line for path in reports for line in cost_per_million.page_lines(json.loads(path.read_text()))]
    assert len(lines) >= 5 and [line for line in lines if line not in page] == []


@pytest.mark.slow
def test_a_million_rows_are_measured_for_every_method(tmp_path, monkeypatch):
    options = ["--smallest", "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [cost_per_million.__file__, *options])
    cost_per_million.main()
    report = json.loads((tmp_path / "cost_per_million.json").read_text())
    measured = {(row["family"], row["method"]) for row in report["rows"]}
    assert measured == {(family, method) for family in ("vit", "bert") for method in cost_per_million.METHODS}
    assert all(row["forward"] > 0 and row["whole"] > 0 for row in report["rows"])
    page = (tmp_path / "cost_per_million.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))


@pytest.mark.slow
def test_one_worker_and_two_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", [predict_workers.__file__, "--smallest", "--output", str(tmp_path)])
    predict_workers.main()
    report = json.loads((tmp_path / "predict_workers.json").read_text())
    assert [(run["engine"], run["workers"]) for run in report["runs"]] == [("plain", 1), ("plain", 2)]
    assert all(run["rate"] > 0 and run["start"] > 0 for run in report["runs"]) and report["written"] > 0
    page = (tmp_path / "predict_workers.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))
