"""Every experiment runs in its smallest form."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import comparison, train_vit_cifar10, units
from experiments.smallest import SMALLEST
from experiments.units import Unit, missing_packages, units_of


pytestmark = pytest.mark.slow


def call(module, monkeypatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", [module.__file__, "--smallest", "--device", "cpu", *options])
    module.main()


def install_nothing(monkeypatch) -> None:
    util = SimpleNamespace(find_spec=lambda name: None)
    monkeypatch.setattr(units, "importlib", SimpleNamespace(util=util))


def test_a_backbone_is_trained_and_asks_for_data_that_is_not_made_up(monkeypatch, capsys):
    call(train_vit_cifar10, monkeypatch)
    assert "test accuracy 0." in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", [train_vit_cifar10.__file__])
    with pytest.raises(SystemExit):
        train_vit_cifar10.main()
    assert "--data or --output is missing" in capsys.readouterr().err


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
    # as where nothing can be fine-tuned: it is the members that take long
    install_nothing(monkeypatch)
    call(comparison, monkeypatch, "--threads", "1")
    output = capsys.readouterr().out
    needing = sum(bool(missing_packages(unit)) for unit in units_of(SMALLEST, seeds=1, backbones=3))
    assert f"needs accelerate, peft: {needing} of " in output
    assert "| Deep Ensembles |" in output and "| Hydra (Taylor) |" in output and "LoRA" not in output
    assert snapshot(comparison.RESULTS) == before and not list(tmp_path.iterdir())


def test_only_what_trains_members_waits_for_packages(monkeypatch):
    install_nothing(monkeypatch)
    assert missing_packages(Unit("backbones", 0)) == missing_packages(Unit("judge", 0, "untuned")) == []
    assert missing_packages(Unit("member", 0, "circ-acc")) == missing_packages(Unit("judge", 0, "budgets"))
    assert missing_packages(Unit("lora", 0)) == missing_packages(Unit("judge", 0, "tuned")) == ["accelerate", "peft"]


def test_a_comparison_that_cannot_fine_tune_is_refused_at_once(monkeypatch, capsys):
    install_nothing(monkeypatch)
    monkeypatch.setattr(sys, "argv", [comparison.__file__, "--data", "data"])
    with pytest.raises(SystemExit):
        comparison.main()
    assert "fine-tuning needs accelerate and peft: pip install accelerate peft" in capsys.readouterr().err
