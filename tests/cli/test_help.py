"""The commands, their options, and how words are read."""

import re
import shlex
import subprocess
import sys

import pytest

from hydra_transformers import training
from hydra_transformers.cli import COMMANDS, main, runner
from hydra_transformers.cli.finetune import training_settings
from hydra_transformers.serving import saved_models
from hydra_transformers.training import trackers
from tests.command_line import parsed
from tests.pages import ROOT


NAMES = {function.__name__: example for commands in COMMANDS.values() for function, example in commands}
NEEDED = ["--data", "d", "--output", "o"]


def test_there_are_fourteen_commands_of_at_most_twenty_options():
    """`calibrate` has the most: one for each kind of promise."""
    assert sorted(NAMES) == sorted(runner().commands) and len(NAMES) == 14
    for name, command in runner().commands.items():
        options = [parameter for parameter in command.params if parameter.param_type_name == "option"]
        assert len(options) <= 20, name
        assert all(option.help for option in options), name


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_a_help_page_and_an_example_that_is_read(name, capsys):
    assert main([name, "--help"]) == 0
    page = " ".join(capsys.readouterr().out.split())
    assert f"Example: hydra-transformers {name}" in page
    parsed([name, *shlex.split(NAMES[name])])


@pytest.mark.parametrize(
    ("words", "values"),
    [
        (["fuse", "a", "b", "--trunk-layers", "9", "--output", "o"], {"members": ["a", "b"], "trunk_layers": 9}),
        (["finetune", "m", *NEEDED], {"trunk_layers": None, "members": 3, "runs": 2, "learning_rate": None}),
        (["finetune", "m", *NEEDED, "--column", "a", "--column", "b"], {"column": ["a", "b"]}),
        (["predict", "m", "--labels", "cat", "--labels", "dog", "a.png"], {"labels": ["cat", "dog"]}),
        (["evaluate", "m", "--data", "d", "--near", "a=b", "--near", "c=d"], {"near": [("a", "b"), ("c", "d")]}),
    ],
)
def test_words_are_read(words, values):
    found = parsed(words)
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("fuse a --trunk-layers 1.0 --output o", "1.0 is neither a number of layers nor a share of them below 1"),
        ("export m --to nose --output o", "'nose' is not one of 'onnx', 'torch'"),
        ("calibrate m --data d --output o --coverage 90", "90 is not a share between 0 and 1: pass 0.05 for 5 %"),
        ("evaluate m --data d --near grey", "'grey' is not NAME=VALUE"),
        ("finetune m --data d --output o --recipe mnist", "'mnist' is not one of 'imagenet1k', 'cifar100', 'sst2'"),
        ("finetune m --data d --output o --learning-rate best", "best is not a positive number"),
        ("finetune m --data d --output o --learning-rate 0", "0 is not a positive number"),
        ("serve m --max-wait-ms nan", "nan is not a time"),
        ("finetune m --data d", "Missing option '--output'"),
        ("cook m", "No such command"),
    ],
)
def test_wrong_words_get_one_sentence(line, sentence, fails):
    assert sentence in fails(*line.split())


@pytest.mark.parametrize("words", [["finetune", "--help"], ["info", "setup.cfg"]], ids=["help", "a file for a model"])
def test_what_needs_no_model_loads_neither_torch_nor_transformers(words):
    code = "import sys; sys.argv[0] = 'bin/hydra-transformers'; from hydra_transformers.cli import main; "
    code += f"main({words}); "
    code += "print([name for name in ('torch', 'transformers', 'datasets', 'pandas') if name in sys.modules])"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert finished.stdout.splitlines()[-1] == "[]"


def test_all_commands_on_pages_are_read():
    """Commands in README, docs and notebooks' markdown: names and options exist."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    lines = [line for page in pages for line in re.findall(r"^hydra-transformers (.+)$", page.read_text(), re.M)]
    assert len(lines) > 10
    for line in lines:
        words = shlex.split(line, comments=True)
        words = [word for word in words if word not in ("...", "…")]
        if words[0] in NAMES:
            parsed(words)
        else:
            assert words[0].startswith("--"), line


def test_any_field_of_the_training_arguments_may_be_set():
    """Each as the type that it has."""
    pairs = ["weight_decay=0.1", "bf16=true", "class_weights=balanced", "classifier_learning_rate=None", "optim=sgd"]
    pairs += ["gradient_accumulation_steps=4", 'lr_scheduler_kwargs={"a": 1}']
    values = parsed(["finetune", "m", *NEEDED, *(word for pair in pairs for word in ("--set", pair))])
    assert training_settings(values["further"]) == {
        "weight_decay": 0.1,
        "bf16": True,
        "class_weights": "balanced",
        "classifier_learning_rate": None,
        "optim": "sgd",
        "gradient_accumulation_steps": 4,
        "lr_scheduler_kwargs": '{"a": 1}',
    }


def test_what_is_set_and_reported_reaches_the_training(monkeypatch):
    def stop(*arguments, **settings):
        seen.update(settings)
        raise ValueError("enough")

    seen = {}
    monkeypatch.setattr(training, "finetune", stop)
    monkeypatch.setattr(saved_models, "load_config", lambda name: None)
    monkeypatch.setattr(trackers, "get_available_reporting_integrations", lambda: ["wandb", "tensorboard"])
    words = [
        "finetune",
        "m",
        *NEEDED,
        "--set",
        "weight_decay=0.1",
        "--report-to",
        "wandb",
        "--report-to",
        "tensorboard",
    ]
    assert main(words) == 2
    assert seen["weight_decay"] == 0.1 and seen["report_to"] == ["wandb", "tensorboard"]
