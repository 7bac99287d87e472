"""Training in other processes: two that share the work, and one that is killed."""

import json
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.baselines.one_training import train_baseline
from tests.processes import exit_code, start
from tests.training.child import BASELINES, GLOBAL_BATCH, GROUP, main, train_in_one_run, train_members


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes leave behind that train together, the first of which is killed later
    on."""
    folder = tmp_path_factory.mktemp("processes")
    codes, logs = in_two_processes(main, folder)
    assert codes == [-signal.SIGKILL, 0], logs
    return folder


def in_two_processes(function: Callable, folder: Path) -> tuple[list[int], str]:
    """The exit codes of two processes that torchrun could have started, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in "01":
        group = dict(zip(GROUP, ("127.0.0.1", port, "2", "2", rank, rank), strict=True))
        ranks.append(start(folder / f"{rank}.log", function, folder, environment=group))
    codes = [exit_code(process) for process in ranks]
    return codes, "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """The weights of members that one process trained, without a break."""
    return train_members(tmp_path_factory.mktemp("alone"), GLOBAL_BATCH)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], atol: float = 1e-6) -> None:
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=atol, msg=name)


def test_two_processes_train_a_hydra_in_one_run_as_one_does(folder, tmp_path):
    expected = train_in_one_run(tmp_path, GLOBAL_BATCH)
    for run in ("plain", "checkpointing"):
        for rank in range(2):
            assert_close(load_file(folder / f"{run}-{rank}.safetensors"), expected)


def test_two_processes_train_a_baseline_as_one_does(folder, tmp_path):
    for kind in BASELINES:
        expected = train_baseline(kind, tmp_path, GLOBAL_BATCH)
        for rank in range(2):
            assert_close(load_file(folder / f"{kind}-{rank}.safetensors"), expected, atol=1e-5)


def test_two_processes_fine_tune_members_as_one_does(folder, alone):
    for index, weights in enumerate(alone):
        for rank in range(2):
            assert_close(load_file(folder / f"member-{index}-{rank}.safetensors"), weights)


def test_fsdp_trains_members_and_fused_hydras_as_one_process_does(folder):
    for rank in range(2):
        distances = json.loads((folder / f"sharded-{rank}.json").read_text())
        assert set(distances) == {"member", "fused"} and max(distances.values()) < 1e-12


def test_a_killed_run_resumes_to_the_weights_of_an_unbroken_one(folder, alone):
    assert (folder / "killed" / "member-0" / "checkpoints" / "checkpoint-3").exists()
    for expected, found in zip(alone, train_members(folder / "killed", GLOBAL_BATCH), strict=True):
        assert_close(found, expected)
