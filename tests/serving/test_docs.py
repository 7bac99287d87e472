"""The examples of docs/serving.md, docs/scaling.md and docs/app.md run, and what the pages say is so."""

import re
import shutil

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from hydra_transformers.cli import main
from hydra_transformers.hub.handler import FORMATS, MOST_PIXELS
from hydra_transformers.serving import page_inputs
from hydra_transformers.serving.page_inputs import Limits
from hydra_transformers.serving.server import SECONDS_FOR_BODY, SECONDS_TO_CLOSE
from tests.pages import ROOT, run_python_blocks
from tests.serving.tiny import base64_of


PHOTOS = {
    "photo.jpg": Image.radial_gradient("L"),
    "one.jpg": Image.radial_gradient("L"),
    "two.jpg": Image.linear_gradient("L"),
}
FLAGS = re.compile(r"--[a-z]+(?:-[a-z]+)*\b")  # not torchrun's, which have underscores


@pytest.fixture
def readers_folder(folders, tmp_path, monkeypatch):
    """What the pages suppose to be there: a calibrated Hydra, its backbone, and photos."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders["images"], "my-calibrated-hydra")
    shutil.copytree(folders["single"], "my-backbone")
    for name, image in PHOTOS.items():
        image.convert("RGB").save(name)
    return tmp_path


def test_the_example_of_the_server_runs(readers_folder):
    with TestClient(run_python_blocks("docs/serving.md")["app"]) as client:
        answer = client.post("/predict", json={"inputs": base64_of(PHOTOS["photo.jpg"].convert("RGB"))}).json()
        refused = client.post("/predict", json={"inputs": "/etc/passwd"})
        assert client.get("/").json()["limits"]["max_batch"] == 8
    assert answer["abstain"] in (True, False) and refused.status_code == 422
    assert "inputs[0] is not base64" in refused.json()["error"]


def test_the_example_of_the_predictor_runs(readers_folder):
    answers = run_python_blocks("docs/scaling.md")["answers"]
    assert len(answers["label"]) == 2 and set(answers["abstain"]) <= {True, False}


@pytest.mark.slow
def test_the_example_of_the_page_runs(readers_folder, capsys):
    names = run_python_blocks("docs/app.md")
    assert "http://127.0.0.1:" in capsys.readouterr().out and len(names["answer"]["members"]) == 3
    assert (readers_folder / "my-space" / "app.py").exists()


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        ("docs/serving.md", ["serve"]),
        ("docs/app.md", ["app", "push"]),
        ("docs/scaling.md", ["predict", "export", "finetune"]),
    ],
)
def test_the_pages_name_flags_that_exist(page, commands, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in commands:
        assert main([command, "--help"]) == 0
    named = set(FLAGS.findall((ROOT / page).read_text())) - {"--nproc-per-node"}  # of torchrun
    assert named <= set(FLAGS.findall(capsys.readouterr().out))


def test_the_pages_tell_the_limits():
    server, page = ((ROOT / "docs" / name).read_text() for name in ("serving.md", "app.md"))
    assert all(flag in server for flag in ("--max-batch", "--max-wait-ms", "--max-queue", "--max-body-mb"))
    assert all(name in server.upper() for name in FORMATS) and all(name in page for name in page_inputs.FORMATS)
    assert f"{MOST_PIXELS // 1_000_000} million pixels" in server and f"at most {SECONDS_TO_CLOSE} seconds" in server
    assert f"within {SECONDS_FOR_BODY:.0f} seconds" in server
    assert f"--max-megabytes {Limits().megabytes:g}" in page and f"--max-characters {Limits().characters}" in page
    assert f"{Limits().pixels // 1_000_000} million pixels" in page
