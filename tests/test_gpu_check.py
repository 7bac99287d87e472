"""The check of everything on a GPU: it leaves nothing out without saying so."""

import json
import sys

import pytest

from scripts import device_checks, gpu_check
from tests.families import FAMILIES, VARIANTS, VIT


CHECK = ["scripts/device_checks.py", "vit", "eager", "cuda"]


def test_all_families_all_benchmarks_and_all_tests_that_need_cuda_take_part():
    names = [name for name, _ in gpu_check.parts("cuda", compiled=True)]
    assert sum(name.endswith(", eager") for name in names) == len(FAMILIES)
    assert sum(name.endswith(", compiled") for name in names) == len(FAMILIES) - len(VARIANTS)
    expected = {"benchmarks/inference_cost.py", "-m experiments.one_run", "-m experiments.zero_shot"}
    assert expected <= set(names) and "benchmarks/provenance.py" not in names
    assert "tests/shift/test_corruptions.py" in names and "tests/test_gpu_check.py" not in names


@pytest.mark.parametrize(
    "command, code, output, status",
    [
        (["-m", "pytest"], 0, "1 passed", "ok"),
        (["-m", "pytest"], 1, "1 failed", "failed"),
        (["-m", "pytest"], 0, f"1 skipped: {gpu_check.NEEDS_CUDA}", "failed"),
        (["-m", "pytest"], 1, "ModuleNotFoundError: No module named 'nothing_like_it'", "left out"),
        (["-m", "pytest"], 1, "ModuleNotFoundError: No module named 'torch'", "failed"),  # it is there
        (CHECK, 0, "", "failed"),  # no step was reported
        (CHECK, -11, "", "failed"),
    ],
)
def test_only_what_ran_on_the_gpu_to_its_end_is_ok(command, code, output, status):
    [line] = gpu_check.lines_of("part", command, "cuda", code, output, 1.0)
    assert line.status == status


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_all_lines_go_to_the_file_and_a_failure_to_the_exit_status(status, tmp_path, monkeypatch, capsys):
    output = tmp_path / "check.txt"
    step = {"name": "vit, eager: fuse", "status": status, "seconds": 1.0, "error": "why"}
    lines = gpu_check.lines_of("vit, eager", CHECK, "cpu", 0, f"{gpu_check.MARK}{json.dumps(step)}\n", 1.0)
    monkeypatch.setattr(gpu_check, "run", lambda *_: lines)
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "cpu", "--only", "vit, e", "--output", str(output)])
    with pytest.raises(SystemExit) as exit_status:
        gpu_check.main()
    assert exit_status.value.code == (0 if status == "ok" else 1)
    for words in ("machine: ", "versions: ", "date: ", "commit: ", "vit, eager: fuse", "only the parts", "s in all"):
        assert words in output.read_text(), words
    assert "vit, eager: fuse" in capsys.readouterr().out


def statuses(capsys) -> dict[str, str]:
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(device_checks.MARK)]
    found = [json.loads(line.removeprefix(device_checks.MARK)) for line in lines]
    return {line["name"].rpartition(": ")[2]: line["status"] for line in found}


@pytest.mark.slow
def test_a_wrong_answer_fails_and_so_does_what_needs_a_failed_step(monkeypatch, capsys):
    checks = device_checks.Checks(VIT, "eager", "cpu")
    checks.run()
    assert set(statuses(capsys).values()) == {"ok"}
    logits = checks.life.logits
    monkeypatch.setattr(checks.life, "logits", lambda model: logits(model) + 1e-3)
    checks.run()
    assert statuses(capsys)["fuse"] == "failed"
    monkeypatch.undo()
    broken = device_checks.Checks(VIT, "eager", "cpu")
    monkeypatch.setattr(broken, "fuse", lambda: 1 / 0)
    broken.fuse.__name__ = "fuse"
    broken.run()
    expected = {"fuse": "failed", "finetune": "failed", "save and load": "failed", "circuit": "ok"}
    assert statuses(capsys) == expected
