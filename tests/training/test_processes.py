"""Training in other processes: two that share the work, and one that is killed."""

import json
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import exit_code, start
from tests.training.child import GLOBAL_BATCH, GROUP, lose_one, main, stall, train_fused, train_members


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes leave behind that train together, the first of which is killed later on."""
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
def fused_alone(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of a fused Hydra that one process trained."""
    return train_fused(tmp_path_factory.mktemp("fused"), GLOBAL_BATCH)


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[dict[str, torch.Tensor]]:
    """The weights of members that one process trained, without a break."""
    return train_members(tmp_path_factory.mktemp("alone"), GLOBAL_BATCH, members=3)


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(found[name], weight, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("run", ["plain", "checkpointing"])
def test_two_processes_train_a_fused_hydra_as_one_does(run, folder, fused_alone):
    for rank in range(2):
        assert_close(load_file(folder / f"{run}-{rank}.safetensors"), fused_alone)


def test_two_processes_fine_tune_members_as_one_does(folder, alone):
    for index, weights in enumerate(alone[:2]):
        for rank in range(2):
            assert_close(load_file(folder / f"member-{index}-{rank}.safetensors"), weights)


def test_fsdp_trains_members_and_fused_hydras_as_one_process_does(folder):
    for rank in range(2):
        distances = json.loads((folder / f"sharded-{rank}.json").read_text())
        assert set(distances) == {"member", "fused"} and max(distances.values()) < 1e-12


def test_members_divided_over_processes_are_bit_for_bit_those_of_one(folder, alone):
    for index, weights in enumerate(alone):
        for rank in range(2):
            found = load_file(folder / f"apart-{index}-{rank}.safetensors")
            assert all(torch.equal(found[name], weight) for name, weight in weights.items())


def test_a_member_that_fails_in_one_process_is_named_in_all(folder):
    for rank in range(2):
        sentence = (folder / f"failed-{rank}.txt").read_text()
        assert sentence == f"the training of {folder / 'apart' / 'member-1'} failed (OSError: the disk is full)"
    said = (folder / "0.log").read_text()
    assert "3 members over 2 processes" in said and "member-1: finished, validation accuracy" in said


def test_a_member_whose_process_is_killed_is_named_and_trained_next_time(tmp_path, alone):
    codes, logs = in_two_processes(lose_one, tmp_path)
    assert codes == [1, -signal.SIGKILL], logs
    assert "RuntimeError: a process has ended too early (not finished: member-1): see what it printed" in logs
    for expected, found in zip(alone[:2], train_members(tmp_path / "lost", GLOBAL_BATCH), strict=True):
        assert_close(found, expected)


def test_fsdp_is_refused_where_members_are_divided(folder):
    for rank in range(2):
        assert "FSDP and DeepSpeed spread each member over all" in (folder / f"refused-{rank}.txt").read_text()


def test_a_killed_run_resumes_to_the_weights_of_an_unbroken_one(folder, alone, capsys):
    resumed = train_members(folder / "killed", GLOBAL_BATCH)
    assert "member-0, learning rate 0.1: going on from checkpoint-3" in capsys.readouterr().out
    for expected, found in zip(alone[:2], resumed, strict=True):
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
    for expected, found in zip(alone[:2], train_members(shared, GLOBAL_BATCH), strict=True):
        assert_close(found, expected)
