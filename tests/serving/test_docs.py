"""The examples of docs/serving.md run, and what the page says is so."""

import re
import shutil

import pytest
from fastapi.testclient import TestClient
from PIL import Image

from hydra_transformers.cli import main
from hydra_transformers.serving.answerer import FORMATS, MOST_PIXELS
from hydra_transformers.serving.server import SECONDS_FOR_BODY, SECONDS_TO_CLOSE
from tests.pages import ROOT, run_python_blocks
from tests.serving.tiny import base64_of


PAGE = "docs/serving.md"
PHOTOS = {
    "photo.jpg": Image.radial_gradient("L"),
    "one.jpg": Image.radial_gradient("L"),
    "two.jpg": Image.linear_gradient("L"),
}
FLAGS = re.compile(r"--[a-z]+(?:-[a-z]+)*\b")  # not torchrun's, which have underscores


@pytest.fixture
def readers_folder(folders, tmp_path, monkeypatch):
    """What the page supposes to be there: a calibrated Hydra, and photos."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(folders["images"], "my-calibrated-hydra")
    for name, image in PHOTOS.items():
        image.convert("RGB").save(name)
    return tmp_path


@pytest.mark.slow
def test_the_examples_of_the_page_run(readers_folder, capsys):
    names = run_python_blocks(PAGE)
    with TestClient(names["app"]) as client:
        answer = client.post("/predict", json={"inputs": base64_of(PHOTOS["photo.jpg"].convert("RGB"))}).json()
        refused = client.post("/predict", json={"inputs": "/etc/passwd"})
        too_many = client.post("/predict", json={"inputs": ["a"] * 9}).json()
        assert too_many == {"error": "inputs has 9 entries: send 1 to 8"}
    assert answer["abstain"] in (True, False) and refused.status_code == 422
    assert "inputs[0] is not base64" in refused.json()["error"]
    assert len(names["answers"]["label"]) == 2 and set(names["answers"]["abstain"]) <= {True, False}
    assert "http://127.0.0.1:" in capsys.readouterr().out and len(names["answer"]["members"]) == 3
    assert (readers_folder / "my-space" / "app.py").exists()


def test_the_page_names_flags_that_exist(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("serve", "app", "push", "predict", "finetune"):
        assert main([command, "--help"]) == 0
    named = set(FLAGS.findall((ROOT / PAGE).read_text())) - {"--nproc-per-node"}  # of torchrun
    assert named <= set(FLAGS.findall(capsys.readouterr().out))


@pytest.mark.slow
def test_the_page_tells_the_limits(pages):
    page = (ROOT / PAGE).read_text()
    assert all(flag in page for flag in ("--max-batch", "--max-wait-ms", "--max-queue", "--max-body-mb"))
    assert all(name in page.upper() for name in FORMATS)
    assert f"{MOST_PIXELS // 1_000_000} million pixels" in page and f"at most {SECONDS_TO_CLOSE} seconds" in page
    assert f"within {SECONDS_FOR_BODY:.0f} seconds" in page
    assert f"at most {pages.MOST_MEGABYTES} MB" in page
