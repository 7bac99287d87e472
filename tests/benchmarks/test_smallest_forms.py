"""Every benchmark runs in its smallest form, and says where its figures come from."""

import json
import subprocess
import sys
from pathlib import Path

import inference_cost
import pytest
import torch

import provenance
from tests.pages import ROOT


SCRIPTS = [path for path in sorted((ROOT / "benchmarks").glob("*.py")) if "__main__" in path.read_text()]


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_every_benchmark_runs_and_names_its_machine_and_commit(script, tmp_path, monkeypatch):
    module = __import__(script.stem)
    some = [inference_cost.SINGLE, inference_cost.IN_SEQUENCE, inference_cost.METHODS[-1]]
    less = ["--families", "vit", "--methods", *some] if script.stem == "inference_cost" else []
    monkeypatch.setattr(sys, "argv", [str(script), "--smallest", "--device", "cpu", *less, "--output", str(tmp_path)])
    module.main()
    [report] = map(json.loads, (path.read_text() for path in tmp_path.glob("*.json")))
    [page] = (path.read_text() for path in tmp_path.glob("*.md"))
    assert all(f"{key}: {report['machine'][key]}" in page for key in ("machine", "versions", "date", "commit"))


@pytest.mark.slow
def test_the_papers_row_is_one_vit_in_batches_of_four(tmp_path, monkeypatch):
    words = ["--paper", "--smallest", "--device", "cpu", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["inference_cost.py", *words])
    inference_cost.main()
    rows = json.loads((tmp_path / "inference_cost.json").read_text())["rows"]
    assert [row["method"] for row in rows] == inference_cost.PAPER_METHODS
    assert {"single", "3 models in sequence", "Hydra 3 x 8"} <= set(inference_cost.PAPER_METHODS)
    assert {row["family"] for row in rows} == {"vit"}


@pytest.mark.slow
def test_whatever_is_measured_was_loaded_and_runs(tmp_path):
    family = inference_cost.FAMILIES["vit"]
    saved = inference_cost.SavedModels(family, family.smallest, tmp_path)
    for method in inference_cost.METHODS:
        model = saved.load(method, torch.bfloat16, "cpu")
        models = model.models if method == inference_cost.IN_SEQUENCE else [model]
        assert all(Path(member.config.name_or_path).parent == tmp_path for member in models), method
        assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}, method
        with torch.inference_mode():
            model(pixel_values=family.inputs(family.smallest, 1)["pixel_values"].bfloat16())


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


def test_the_hash_of_the_package_is_that_of_its_code(tmp_path):
    def hashed(source: str) -> str:
        (tmp_path / "hydra_transformers").mkdir(exist_ok=True)
        (tmp_path / "hydra_transformers" / "code.py").write_text(source)
        return provenance.package(tmp_path)

    plain = hashed('def f():\n    return "# a"\n')
    assert hashed('"""A."""\n\n\ndef f():\n    """Two\n    lines."""\n    # B.\n    return "# a"  # C.\n') == plain
    assert hashed('def f():\n    return "# b"\n') != plain
