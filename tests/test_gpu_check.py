"""The check of everything on a GPU: it leaves nothing out without saying so."""

import json
import sys
from pathlib import Path

import pytest

from scripts import device_checks, gpu_check
from scripts.gpu_check import Finished, Line, Part
from tests.families import FAMILIES, VARIANTS, VIT
from tests.pages import ROOT


PART = Part("tests/models/test_hub.py", [], list)


def read_report(tmp_path: Path, cases: str, device: str = "cuda", returncode: int = 1) -> list[Line]:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    return gpu_check.test_lines(Finished(PART, returncode, "output", 2.0), report, device)


def test_all_tests_that_need_cuda_all_benchmarks_and_all_families_take_part(tmp_path):
    names = {part.name for part in gpu_check.test_parts(tmp_path, "cuda")}
    assert names == {"tests/fast/test_kernels.py", "tests/shift/test_corruptions.py"}
    scripts = {part.name for part in gpu_check.benchmark_parts("cuda")}
    expected = ("benchmarks/inference_cost.py", "-m experiments", "-m experiments.zero_shot")
    assert {f"{what} --smallest" for what in expected} <= scripts
    assert not any("provenance" in name for name in scripts)
    # eager, compiled without the variants, and the first compiled under a default device
    assert len(list(gpu_check.check_parts("cuda"))) == 3 * len(FAMILIES) - len(VARIANTS) + 1


def test_a_failed_test_is_shown_with_the_end_of_its_error(tmp_path):
    failure = "<failure message='assert 1 == 2'>many\nlines\nE assert 1 == 2</failure>"
    of_file, of_test = read_report(tmp_path, f"<testcase name='a'/><testcase name='b' time='3'>{failure}</testcase>")
    assert of_file.status == of_test.status == "failed" and of_file.remark == "1 passed, 1 failed"
    assert of_test.name == f"{PART.name}::b" and str(of_test).endswith("E assert 1 == 2")


def test_errors_name_files_without_the_folder_that_they_lie_in():
    line = Line("failed", "a", 1.0, error=f'File "{ROOT}/tests/families.py", line 1')
    assert str(line).endswith('File "tests/families.py", line 1')


def test_tests_that_wait_for_a_package_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "missing_packages", lambda: ["PIL", "accelerate"])
    error = "<error message='collection failure'>E   ModuleNotFoundError: No module named 'PIL'</error>"
    [needing] = read_report(tmp_path, f"<testcase name='file'>{error}</testcase>", returncode=2)
    count = gpu_check.test_functions(ROOT / PART.name)
    assert needing.status == "needs pillow" and needing.remark == f"{count} tests" and count >= 10
    for message in ("Using the Trainer requires `accelerate>=1.1.0`", "needs accelerate: pip install accelerate"):
        assert gpu_check.needed_package(f"E   ImportError: {message}") == "accelerate"
    assert gpu_check.needed_package("E   assert 'accelerate' == 'peft'") is None


def test_a_benchmark_that_needs_a_missing_package_has_not_failed(monkeypatch):
    monkeypatch.setattr(gpu_check, "missing_packages", lambda: ["fastapi"])
    output = "ModuleNotFoundError: No module named 'fastapi'"
    [line] = gpu_check.benchmark_lines(Finished(PART, 1, output, 1.0))
    assert line.status == "needs fastapi"
    monkeypatch.setattr(gpu_check, "missing_packages", list)
    assert gpu_check.benchmark_lines(Finished(PART, 1, output, 1.0))[0].status == "failed"


def test_a_package_that_is_there_excuses_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "missing_packages", list)
    error = "<error message='collection failure'>E   ModuleNotFoundError: No module named 'PIL'</error>"
    statuses = [line.status for line in read_report(tmp_path, f"<testcase name='file'>{error}</testcase>")]
    assert statuses == ["failed", "failed"]


def test_tests_for_cuda_may_be_skipped_on_a_cpu_alone(tmp_path):
    skipped = f"<testcase name='a'><skipped message='{gpu_check.NEEDS_CUDA}'/></testcase>"
    [on_cpu] = read_report(tmp_path, skipped, "cpu", returncode=0)
    assert on_cpu.status == "ok" and "1 skipped: needs a CUDA device" in on_cpu.remark
    assert read_report(tmp_path, skipped, "cuda", returncode=0)[0].status == "failed"


@pytest.mark.parametrize("returncode", [3, -11])
def test_a_run_that_broke_off_has_failed(tmp_path, returncode):
    assert read_report(tmp_path, "<testcase name='a'/>", returncode=returncode)[0].status == "failed"
    assert gpu_check.check_lines(Finished(PART, returncode, "", 1.0))[-1].status == "failed"
    assert gpu_check.benchmark_lines(Finished(PART, returncode, "", 1.0))[-1].status == "failed"


def test_no_report_no_check_and_no_test_are_failures(tmp_path):
    finished = Finished(PART, 0, "", 1.0)
    assert gpu_check.test_lines(finished, tmp_path / "none.xml", "cpu")[0].status == "failed"
    assert read_report(tmp_path, "", returncode=5)[0].status == "failed"
    assert gpu_check.check_lines(finished)[0].status == "failed"


def test_a_benchmark_says_what_it_left_out():
    [ran, left_out] = gpu_check.benchmark_lines(Finished(PART, 0, "x\nneeds accelerate: 3 of 9 units\ny", 1.0))
    assert ran.status == "ok" and (left_out.status, left_out.remark) == ("needs accelerate", "3 of 9 units")


def printed(capsys) -> dict[str, dict]:
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith(device_checks.MARK)]
    found = [json.loads(line.removeprefix(device_checks.MARK)) for line in lines]
    return {line["name"].rpartition(": ")[2]: line for line in found}


def test_a_step_that_fails_fails_what_needs_it_and_nothing_else(monkeypatch, capsys):
    class Unfusable(device_checks.Checks):
        def fuse(self) -> None:
            raise ValueError("on two devices")

    Unfusable(VIT, "eager", "cpu", is_default=False).run()
    lines = printed(capsys)
    assert {step: line["status"] for step, line in lines.items()} == {
        "fuse": "failed",
        "fine-tune": "failed",
        "save": "failed",
        "load": "failed",
        "circuit": "ok",
    }
    assert "on two devices" in lines["fuse"]["error"] and "an earlier step made no hydra" in lines["save"]["error"]


@pytest.mark.slow
def test_a_wrong_answer_fails(monkeypatch, capsys):
    class Wrong(device_checks.Checks):
        def _logits(self, model):
            logits = super()._logits(model)
            return logits + 1e-3 if self.is_default else logits

    Wrong(VIT, "eager", "cpu", is_default=True).run()
    assert printed(capsys)["fuse"]["status"] == "failed"


@pytest.mark.parametrize("status", ["ok", "failed"])
def test_all_lines_go_to_the_file_and_a_failure_to_the_exit_status(status, tmp_path, monkeypatch, capsys):
    output = tmp_path / "check.txt"
    line = {"name": "vit, eager, on cpu: fuse", "status": status, "seconds": 1.0, "remark": "", "error": "why"}
    finished = Finished(PART, 0, f"{device_checks.MARK}{json.dumps(line)}\n", 1.0)
    monkeypatch.setattr(gpu_check, "run", lambda part, *_: Finished(part, 0, finished.output, 1.0))
    options = ["--device", "cpu", "--only", "vit, eager, on", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", *options])
    with pytest.raises(SystemExit) as exit_status:
        gpu_check.main()
    assert exit_status.value.code == (0 if status == "ok" else 1)
    text = output.read_text()
    for words in ("machine: ", "versions: ", "date: ", "commit: ", "vit, eager, on cpu: fuse", "skipped", "s in all"):
        assert words in text, words
    assert "vit, eager, on cpu: fuse" in capsys.readouterr().out
