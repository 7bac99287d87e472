"""Training in other processes: two that share the work, and one that is killed."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.child import GLOBAL_BATCH, GROUP, train_fused, train_members


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """What two processes leave behind that train together, the first of which is killed later on."""
    folder = tmp_path_factory.mktemp("processes")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [start(folder, ("127.0.0.1", port, "2", "2", str(rank), str(rank))) for rank in range(2)]
    codes = [process.wait(timeout=300) for process in ranks]
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


def start(folder: Path, group: tuple[str, ...]) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"} | dict(zip(GROUP, group, strict=True))
    environment["PYTHONPATH"] = os.pathsep.join(path or os.getcwd() for path in sys.path)
    command = [sys.executable, "-m", "tests.training.child", str(folder)]
    with (folder / f"{group[-1]}.log").open("w") as log:
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)


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


STALLED = """
import sys
from pathlib import Path
from tests.training.child import GLOBAL_BATCH, ROWS, Stalling, train_members
from tests.training.tiny import tiny_dataset

train_members(Path(sys.argv[1]), GLOBAL_BATCH, Stalling(tiny_dataset("vit", ROWS)))
"""


def test_a_folder_in_which_another_process_trains_is_refused_until_that_is_gone(alone, tmp_path):
    shared = tmp_path / "shared"
    with subprocess.Popen([sys.executable, "-c", STALLED, str(shared)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert any(line.strip() == "training" for line in other.stdout)
            with pytest.raises(RuntimeError, match=f"shared is being written by process {other.pid} on "):
                train_members(shared, GLOBAL_BATCH)
        finally:
            other.kill()
    for expected, found in zip(alone, train_members(shared, GLOBAL_BATCH), strict=True):
        assert_close(found, expected)
