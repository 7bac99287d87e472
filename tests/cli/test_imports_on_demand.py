"""Help comes at once, and the Auto classes know the Hydras whoever is imported first."""

import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoConfig

import hydra_transformers
from hydra_transformers.cli import COMMANDS, main
from hydra_transformers.cli.flags import choices
from hydra_transformers.cost import TEXT_TOKENS
from hydra_transformers.models.configuration_hydra import SHARED_PARTS
from hydra_transformers.models.detection import DETECTORS
from hydra_transformers.pruning.scoring import OBJECTIVES, OOD_SCORES
from hydra_transformers.registration import register_with_transformers
from hydra_transformers.shift import SEVERITIES
from hydra_transformers.training import RECIPES


ROOT = Path(__file__).parents[2]

HELP = """
import contextlib, io, sys
from hydra_transformers.cli import COMMANDS, main

for words in (["--help"], ["--version"], *([command, "--help"] for command in COMMANDS)):
    with contextlib.redirect_stdout(io.StringIO()) as told:
        try:
            main(words)
        except SystemExit as stop:
            assert stop.code == 0, words
    assert told.getvalue(), words
    slow = {"datasets", "gradio", "fastapi", "matplotlib", "numpy", "onnx", "torch", "transformers"} & set(sys.modules)
    assert not slow, f"{words} imports {slow}"
"""

HYDRA_FIRST = """
import importlib.util, sys
import hydra_transformers

assert not {"torch", "transformers"} & set(sys.modules)
importlib.util.find_spec("transformers")  # as libraries look whether it is installed
from transformers import AutoConfig

assert type(AutoConfig.for_model("hydra_vit")).__module__ == "hydra_transformers.models.configuration_hydra_vit"
"""


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=300)


def test_help_imports_nothing_slow():
    run(HELP)


@pytest.mark.slow
def test_auto_classes_know_hydras_when_transformers_is_imported_later():
    run(HYDRA_FIRST)


def test_auto_classes_know_hydras_at_once_when_transformers_is_there():
    """The order of all other tests: Transformers first."""
    finders = list(sys.meta_path)
    register_with_transformers()
    assert sys.meta_path == finders
    assert type(AutoConfig.for_model("hydra_vit")) is hydra_transformers.HydraViTConfig


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"hydra-transformers {hydra_transformers.__version__}\n"


def test_choices_are_those_of_the_package():
    assert choices.OBJECTIVES == OBJECTIVES and choices.SHARED_PARTS == SHARED_PARTS
    assert tuple(sorted(RECIPES)) == choices.RECIPES
    assert tuple(DETECTORS) == choices.DETECTORS and choices.CIRCUIT_SCORES == OOD_SCORES
    assert choices.SEVERITIES == SEVERITIES and choices.TEXT_TOKENS == TEXT_TOKENS


def test_every_command_runs_what_its_arguments_are_declared_for():
    for name, command in COMMANDS.items():
        if name != "demo":
            module = __import__(f"hydra_transformers.cli.{command.module}", fromlist=[name])
            assert callable(getattr(module, name)), name


def test_public_names_come_when_they_are_asked_for():
    names = hydra_transformers.__all__
    assert {"AutoHydra", "HydraViTModel", "hydrate", "prepare"} <= set(names) <= set(dir(hydra_transformers))
    assert all(getattr(hydra_transformers, name).__name__ == name for name in names)
    assert hydra_transformers.uncertainty.decompose
    with pytest.raises(AttributeError, match="has no attribute 'hydrat'"):
        _ = hydra_transformers.hydrat
