"""The benchmark of quantised Hydras runs in its smallest form, without torchao."""

import json
import sys

import pytest
import quantised


def call(monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [quantised.__file__, "--device", "cpu", *options])
    quantised.main()


def test_every_way_is_measured_against_the_hydra_as_it_is(tmp_path, monkeypatch):
    call(monkeypatch, "--smallest", "--output", str(tmp_path))
    report = json.loads((tmp_path / "quantised.json").read_text())
    as_it_is, mlps, *everything = report["rows"]
    assert as_it_is["change"] == as_it_is["other_answers"] == 0
    assert mlps["linear_layers"] == as_it_is["linear_layers"]  # the packed layers are not among them
    for row in everything:
        assert row["linear_layers"] > mlps["linear_layers"]
        assert row["change"] > mlps["change"] > 0
    page = (tmp_path / "quantised.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))


def test_chosen_ways_are_measured_alone(tmp_path, monkeypatch):
    call(monkeypatch, "--smallest", "--ways", "weights", "--images", "8", "--output", str(tmp_path))
    report = json.loads((tmp_path / "quantised.json").read_text())
    assert [row["what"] for row in report["rows"]] == [quantised.AS_IT_IS, quantised.WAYS["weights"]]
    assert report["machine"]["measured"].startswith("8 test images")


def test_it_says_what_it_needs(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch)
    assert "--model or --data is missing" in capsys.readouterr().err
