"""Circuits by a short list beside exact ones, in the smallest form of the benchmark."""

import json
import sys

import pytest

from benchmarks import circuit_shortlist


@pytest.mark.slow
def test_every_short_list_is_compared_with_the_exact_circuit(tmp_path, monkeypatch):
    output = tmp_path / "shortlist"
    monkeypatch.setattr(sys, "argv", ["circuit_shortlist", "--smallest", "--device", "cpu", "--output", str(output)])
    circuit_shortlist.main()
    exact, *others = json.loads(output.with_suffix(".json").read_text())["rows"]
    assert exact["way"] == "exact" and set(exact["agreement"].values()) == {1.0} and exact["held"] is None
    assert len(others) == len(circuit_shortlist.SHORTLISTS)
    assert all(0 <= share <= 1 for row in others for share in row["agreement"].values())
    assert "| exact |" in output.with_suffix(".md").read_text()
