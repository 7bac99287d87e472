"""Training in other processes: two that share the work, and one that is killed."""

import signal
import socket
import time

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import exit_code, start
from tests.training.child import GLOBAL_BATCH, GROUP, main, stall, train_fused, train_members


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes leave behind that train together, the first of which is killed later on."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in "01":
        group = dict(zip(GROUP, ("127.0.0.1", port, "2", "2", rank, rank), strict=True))
        ranks.append(start(folder / f"{rank}.log", main, folder, environment=group))
    codes = [exit_code(process) for process in ranks]
    logs = "".join(f"--- {log.name}\n{log.read_text()}" for log in sorted(folder.glob("*.log")))
    assert codes == [-signal.SIGKILL, 0], logs
    return folder


@pytest.fixture(scope="module")
def fused_alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a fused Hydra that one process trained."""
    return train_fused(tmp_path_factory.mktemp("fused"), GLOBAL_BATCH)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """The weights of members that one process trained, without a break."""
    return train_members(tmp_path_factory.mktemp("alone"), GLOBAL_BATCH)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("run", ["plain", "checkpointing"])
def test_two_processes_train_a_fused_hydra_as_one_does(run, folder, fused_alone):
    for rank in range(2):
        assert_close(load_file(folder / f"{run}-{rank}.safetensors"), fused_alone)


def test_two_processes_fine_tune_members_as_one_does(folder, alone):
    for index, weights in enumerate(alone):
        for rank in range(2):
            assert_close(load_file(folder / f"member-{index}-{rank}.safetensors"), weights)


def test_a_killed_run_resumes_to_the_weights_of_an_unbroken_one(folder, alone, capsys):
    resumed = train_members(folder / "killed", GLOBAL_BATCH)
    assert "member-0, learning rate 0.1: going on from checkpoint-3" in capsys.readouterr().out
    for expected, found in zip(alone, resumed, strict=True):
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=name)


def test_a_folder_in_which_another_process_trains_is_refused_until_that_is_gone(alone, tmp_path):
    shared, log = tmp_path / "shared", tmp_path / "log"
    other = start(log, stall, shared)
    try:
        while not (log.exists() and "training\n" in log.read_text().splitlines(keepends=True)):
            assert other.is_alive(), log.read_text()
            time.sleep(0.05)
        with pytest.raises(RuntimeError, match=f"shared is being written by process {other.pid} on "):
            train_members(shared, GLOBAL_BATCH)
    finally:
        other.kill()
        assert exit_code(other) == -signal.SIGKILL
    for expected, found in zip(alone, train_members(shared, GLOBAL_BATCH), strict=True):
        assert_close(found, expected)
