"""The benchmarks of exported models and of the server run in their smallest form."""

import json
import sys

import export_speed
import pytest
import serving_load


def call(module, monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__file__, "--smallest", *options])
    module.main()


@pytest.mark.slow
def test_every_format_is_measured_and_answers_alike(tmp_path, monkeypatch):
    call(export_speed, monkeypatch, "--batches", "1", "3", "--rounds", "1", "--output", str(tmp_path))
    report = json.loads((tmp_path / "export_speed_cpu.json").read_text())
    ways = [export_speed.SINGLE, export_speed.EAGER, export_speed.ARCHIVE, export_speed.ONNX]
    assert [(row["what"], row["batch"]) for row in report["rows"]] == [
        (way, batch) for batch in (1, 3) for way in ways
    ]
    assert all(row["milliseconds"] > 0 and row["difference"] < 1e-5 for row in report["rows"])
    page = (tmp_path / "export_speed_cpu.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))


@pytest.mark.slow
def test_the_server_is_measured_with_every_model_and_survives(tmp_path, monkeypatch):
    options = ["--requests", "16", "--broken", "24", "--clients", "2", "--output", str(tmp_path)]
    call(serving_load, monkeypatch, *options)
    report = json.loads((tmp_path / "serving_load_cpu.json").read_text())
    assert [row["what"] for row in report["rows"]] == [
        serving_load.SINGLE,
        serving_load.IN_SEQUENCE,
        serving_load.PRUNED,
        serving_load.MERGED,
    ]
    assert sum(report["broken"].values()) == 24 and not {"200", "500"} & set(report["broken"])
    assert report["kill"]["same answers in the end"] == 16 and report["kill"]["lost in flight"] <= 2
    page = (tmp_path / "serving_load_cpu.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))
