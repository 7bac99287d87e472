"""The comparison runs in its smallest form."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import comparison
from experiments.smallest import SMALLEST


pytestmark = pytest.mark.slow


def snapshot(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*.json")}


class InThisProcess:
    """A worker that is done when it has been started."""

    def __init__(self, command: list[str], **_):
        with pytest.MonkeyPatch.context() as patch:
            assert command[1:3] == ["-m", "experiments"]
            patch.setattr(sys, "argv", command[2:])
            comparison.main()

    def poll(self) -> int:
        return 0

    wait = terminate = poll


def test_the_comparison_runs_without_data_and_leaves_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(comparison, "subprocess", SimpleNamespace(Popen=InThisProcess, STDOUT=None))
    before = snapshot(comparison.RESULTS)
    # members take long, and are fine-tuned in other tests
    monkeypatch.setattr(comparison, "SMALLEST", replace(SMALLEST, groups=("untuned", "zero-shot")))
    monkeypatch.setattr(sys, "argv", ["experiments", "--smallest", "--device", "cpu", "--threads", "1"])
    comparison.main()
    output = capsys.readouterr().out
    assert "| Deep Ensembles |" in output and "| Hydra (Taylor) |" in output and "LoRA" not in output
    assert snapshot(comparison.RESULTS) == before and not list(tmp_path.iterdir())
