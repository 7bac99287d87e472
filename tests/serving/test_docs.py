"""The examples of docs/serving.md, docs/scaling.md and docs/app.md run, and what the pages say is so."""

import re

import pytest

from hydra_transformers.cli import main
from hydra_transformers.hub.handler import FORMATS, MOST_PIXELS
from hydra_transformers.serving import page_inputs
from hydra_transformers.serving.page_inputs import SECONDS_TO_READ, Limits
from hydra_transformers.serving.server import SECONDS_FOR_BODY, SECONDS_TO_CLOSE
from tests.pages import ROOT, run_python_blocks


FLAGS = re.compile(r"--[a-z]+(?:-[a-z]+)*\b")  # not torchrun's, which have underscores


def test_the_example_of_the_server_runs(capsys):
    names = run_python_blocks("docs/serving.md")
    assert names["answer"]["abstain"] is None and names["refused"].status_code == 422
    assert "inputs[0] is no base64" in capsys.readouterr().out


def test_the_example_of_the_predictor_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_python_blocks("docs/scaling.md")["answers"]["abstain"] == [None, None]


@pytest.mark.slow
def test_the_examples_of_the_page_run_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = run_python_blocks("docs/app.md", at_least=3)
    assert "http://127.0.0.1:" in capsys.readouterr().out and len(names["answer"]["members"]) == 3
    assert (tmp_path / "my-space" / "app.py").exists()


@pytest.mark.parametrize(
    ("page", "commands"),
    [
        ("docs/serving.md", ["serve"]),
        ("docs/app.md", ["app", "push"]),
        ("docs/scaling.md", ["predict", "export", "build", "finetune"]),
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
    assert f"within {SECONDS_FOR_BODY:.0f} seconds" in server and f"longer than {SECONDS_TO_READ:.0f} seconds" in page
    assert f"--max-megabytes {Limits().megabytes:g}" in page and f"--max-characters {Limits().characters}" in page
    assert f"{Limits().pixels // 1_000_000} million pixels" in page
