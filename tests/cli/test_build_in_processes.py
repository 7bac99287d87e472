"""`build` in several processes, as torchrun starts them, ends with the files of one process."""

import json
import shutil
import socket
import sys

import pytest
import torch
from safetensors.torch import load_file
from transformers import ViTModel

from hydra_transformers.reports.report import UncertaintyReport
from tests.command_line import call
from tests.processes import exit_code, start
from tests.tiny_data import grey_rows, picture_rows, save_vit
from tests.training.child import GROUP


def without_plots(words: list[str]) -> None:
    UncertaintyReport.plot = lambda *_: {}  # drawing takes longest
    sys.exit(call(*words))


@pytest.mark.slow
def test_two_processes_build_the_hydra_of_one(tmp_path):
    save_vit(tmp_path / "vit")
    pretrained = shutil.copytree(tmp_path / "vit", tmp_path / "pretrained")
    ViTModel.from_pretrained(tmp_path / "vit").save_pretrained(pretrained)
    picture_rows(40, names=["blue", "red", "green"]).save_to_disk(tmp_path / "pictures")
    grey_rows(10).save_to_disk(tmp_path / "grey")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def words(output: str) -> list[str]:
        data = ["--data", tmp_path / "pictures", "--ood-data", tmp_path / "grey", "--far", f"grey={tmp_path / 'grey'}"]
        short = ["--members", "3", "--max-steps", "2", "--batch-size", "8", "--budget", "2", "--tune"]
        return [str(each) for each in ("build", pretrained, *data, *short, "--output", tmp_path / output)]

    groups = {rank: dict(zip(GROUP, ("127.0.0.1", port, "2", "2", rank, rank), strict=True)) for rank in "01"}
    runs = {"0": ("together", groups["0"]), "1": ("together", groups["1"]), "alone": ("alone", {})}
    processes = {
        name: start(tmp_path / f"{name}.log", without_plots, words(output), environment=environment)
        for name, (output, environment) in runs.items()
    }
    codes = {name: exit_code(process, 600) for name, process in processes.items()}
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in runs}
    assert set(codes.values()) == {0}, logs
    assert "3 members over 2 processes" in logs["0"] and "The Hydra is in" in logs["0"]
    assert "finished" not in logs["1"] and "member" not in logs["1"]
    files = ["together/model.safetensors", "together/circuits/member-2.json", "together/evaluation/report.json"]
    files += [
        f"together-steps/{step}/member-{m}/model.safetensors" for step in ("finetuned", "tuned") for m in range(3)
    ]
    for name in files:
        found, expected = tmp_path / name, tmp_path / name.replace("together", "alone")
        if name.endswith(".json"):
            one, other = (json.loads(path.read_text().replace("together", "alone")) for path in (found, expected))
            assert one == other, name
        else:
            one, other = load_file(found), load_file(expected)
            assert all(torch.equal(one[key], other[key]) for key in other), name
    assert not list(tmp_path.glob("**/.lock"))


@pytest.mark.parametrize("command", ["fuse", "predict"])
def test_commands_for_one_process_are_refused_in_several(command, fails, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert f"{command} runs in one process: start it without torchrun" in fails(command, "model", "--output", "x")


def test_what_is_divided_is_members_or_batches(fails):
    said = fails("finetune", "model", "--data", "x", "--output", "y", "--divide", "rows")
    assert "'rows' is not one of 'members', 'batches'" in said
