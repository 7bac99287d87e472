"""Every benchmark script runs in its smallest form, and says where it ran."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import detectors
import inference_cost
import pytest
import torch

import provenance
from hydra_transformers.models.detection import DETECTORS
from tests.pages import ROOT


SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


def call(module, monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__file__, "--smallest", "--device", "cpu", *options])
    module.main()


def test_every_script_has_a_smallest_form():
    assert [script.name for script in SCRIPTS if '"--smallest"' not in script.read_text()] == []


# What an ensemble costs


@pytest.mark.slow
def test_the_cost_of_every_family_is_measured(tmp_path, monkeypatch):
    """By what is made of each family in a way of its own; all methods of one are measured below."""
    methods = [f"Hydra 3, ragged{inference_cost.HALF_TRUNK}", inference_cost.THREE_QUARTERS, inference_cost.VMAP]
    call(inference_cost, monkeypatch, "--methods", *methods, "--output", str(tmp_path))
    report = json.loads((tmp_path / "inference_cost.json").read_text())
    measured = [(row["family"], row["method"]) for row in report["rows"]]
    assert measured == list(itertools.product(inference_cost.FAMILIES, [inference_cost.SINGLE, *methods]))
    page = (tmp_path / "inference_cost.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))


@pytest.mark.slow
def test_whatever_is_measured_was_loaded(tmp_path):
    family = inference_cost.FAMILIES["vit"]
    saved = inference_cost.SavedModels(family, family.smallest, tmp_path)
    for method in inference_cost.METHODS:
        model = saved.load(method, torch.bfloat16, "cpu")
        if method == inference_cost.VMAP:
            models = model.template
        else:
            models = model.models if method == inference_cost.IN_SEQUENCE else [model]
        for each in models:
            assert Path(each.config.name_or_path).parent == tmp_path, method
            assert each.config._attn_implementation == "sdpa", method
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}, method


@pytest.mark.slow
def test_the_merged_trunk_is_measured_compiled_too_and_a_limit_ends_it(tmp_path, monkeypatch, capsys):
    compiled, ahead = [], []
    monkeypatch.setattr(torch, "compile", lambda model, mode, **_: compiled.append(mode) or model)
    monkeypatch.setattr(
        inference_cost, "compile_ahead", lambda args, folder: ahead.append(len(list(folder.glob("*/*"))))
    )
    modes = ["--families", "vit", "--modes", "reduce-overhead", "eager", "compiled", "--compile-ahead"]
    methods = ["--methods", inference_cost.THREE_QUARTERS, "--limit", "600", "--output", str(tmp_path)]
    call(inference_cost, monkeypatch, *modes, *methods)
    rows = json.loads((tmp_path / "inference_cost.json").read_text())["rows"]
    assert [row["mode"] for row in rows[::2]] == ["eager", "reduce-overhead", "compiled"]
    assert {row["method"] for row in rows[1::2]} == {inference_cost.THREE_QUARTERS}
    assert compiled == ["reduce-overhead"] * 2 + ["default"] * 2
    assert ahead == [2], "once, when both models lie there"
    assert rows[0]["multiply_adds"] < rows[1]["multiply_adds"] < 2 * rows[0]["multiply_adds"]
    monkeypatch.setattr(inference_cost.time, "perf_counter", iter(range(0, 10_000, 700)).__next__)
    call(inference_cost, monkeypatch, *modes, *methods)
    assert "600 seconds are over: vit float32 batch 2 eager is left out" in capsys.readouterr().out


@pytest.mark.slow
def test_a_method_that_does_not_run_is_told_of_after_all_others_ran(tmp_path, monkeypatch):
    load = inference_cost.SavedModels.load

    def broken(self, method, *given):
        if method == inference_cost.VMAP:
            raise RuntimeError("no such kernel")
        return load(self, method, *given)

    monkeypatch.setattr(inference_cost.SavedModels, "load", broken)
    with pytest.raises(SystemExit, match="vmap over 3 models does not run: RuntimeError: no such kernel"):
        call(inference_cost, monkeypatch, "--families", "vit", "--output", str(tmp_path))
    methods = [row["method"] for row in json.loads((tmp_path / "inference_cost.json").read_text())["rows"]]
    assert methods == [method for method in inference_cost.METHODS if method != inference_cost.VMAP]


# Where figures come from


def test_figures_name_the_commit_and_what_was_changed_since(tmp_path, monkeypatch):
    def git(*arguments: str) -> str:
        author = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
        command = ["git", "-C", str(tmp_path), *author, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert provenance.commit(tmp_path).startswith("unknown")
    git("init", "--quiet")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "table.md").write_text("1")
    git("add", "--all")
    git("commit", "--quiet", "--message", "First")
    commit = git("rev-parse", "--short=12", "HEAD")
    (tmp_path / "benchmarks" / "results" / "table.md").write_text("2")
    assert provenance.commit(tmp_path) == commit
    (tmp_path / "code.py").write_text("2")
    assert provenance.commit(tmp_path) == f"{commit} with changes"
    # a folder inside another project's repository has no commit of its own
    assert provenance.commit(tmp_path / "benchmarks").startswith("unknown")
    # a copy of a commit may lie over the repository of an older one
    monkeypatch.setenv("GIT_COMMIT", "of another machine")
    assert provenance.commit(tmp_path) == "of another machine"


# What detectors cost


@pytest.mark.slow
def test_the_cost_of_every_detector_is_measured(tmp_path, monkeypatch):
    call(detectors, monkeypatch, "--output", str(tmp_path))
    report = json.loads((tmp_path / "detectors.json").read_text())
    measured = {(row["family"], row["what"]) for row in report["rows"]}
    assert measured == {
        (family, what) for family in ("vit", "bert") for what in ("forward", detectors.READING, *DETECTORS)
    }
    page = (tmp_path / "detectors.md").read_text()
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))
