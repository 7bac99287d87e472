"""Help, flags and wrong calls: what the command line itself says."""

import pytest

from hydra_transformers import __version__
from hydra_transformers.cli import main, runner
from hydra_transformers.cli.options import repeat_flags
from tests.command_line import parsed


COMMANDS = runner().commands
DATA = "--data --split --limit --image-column --audio-column --text-column --max-length --label-column --processor"
PART = f"{DATA} --part --labels-in-order"
CARD = "--report --report-model --dataset --base-model --license --fine-tuning"
FLAGS = {
    "demo": "--output --train --fast",
    "app": "--single --examples --labels --processor --host --port --max-megabytes --max-characters --device",
    "build": f"{DATA} --regression --target --time-limit --members --recipe --epochs --max-steps --report-to --budget --ood-data --ood-split "
    "--objective --mode --circuit-rows --tune --trunk-layers --freeze-trunk --test-data --test-split --near --far --seed "
    "--batch-size --divide --device --fine-tunings --trainings --classifiers --tune-jointly --output",
    "finetune": f"{PART} --regression --variance --recipe --members --validation-split --learning-rates --epochs --max-steps --report-to --trunk-layers "
    "--trainings --classifiers --teacher --seed --batch-size --divide --output",
    "prune": f"{PART} --method --members --budget --heads-per-layer --objectives --out-of --trunk-layers --mode --ood-data "
    "--ood-split --score --seed --allow-equal --batch-size --device --output",
    "fuse": "--shared --trunk-layers --aggregate --average-into --allow-equal --processor --output",
    "calibrate": f"{PART} --risk --label-risk --coverage --tpr --confidence --ood-data --detector --training-data --alpha --sets --batch-size "
    "--device --output",
    "evaluate": f"{PART} --compare --near --far --score --fit-data --fit-split --corruptions --severities --batch-size --device "
    "--output",
    "benchmark": "--batch-sizes --seconds --device --output",
    "info": "",
    "analyse": f"{PART} --ood --noisy --budget --budgets --mode --seconds --batch-size --device --output",
    "predict": "--json --labels --top-k --output --split --image-column --audio-column --text-column --strict --engine "
    "--workers --processor --batch-size --device",
    "serve": "--host --port --max-batch --max-wait-ms --max-queue --max-body-mb --no-docs --processor --device",
    "export": "--to --processor --output",
    "card": f"--repo --overwrite {CARD}",
    "push": f"--private --overwrite-card --space --space-single --space-examples {CARD}",
}
NEEDED = ["--data", "rows", "--output", "out"]


def test_there_are_these_commands():
    assert set(COMMANDS) == set(FLAGS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_a_sentence_on_every_flag_and_an_example(command, capsys, monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "200")
    flags = {flag: each for each in COMMANDS[command].params for flag in each.opts if flag.startswith("--")}
    assert set(flags) - {"--debug", "--help"} == set(FLAGS[command].split())
    assert all(each.help for each in COMMANDS[command].params)
    assert main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Example: hydra-transformers {command}" in said and all(f" {flag} " in said for flag in flags)


def test_help_lists_the_commands_and_the_version_is_the_packages(capsys):
    assert main(["--help"]) == 0
    said = capsys.readouterr().out
    assert all(f" {command} " in said for command in COMMANDS)
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"hydra-transformers {__version__}\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["benchmark", "x", "--batch-sizes", "1", "8"], {"batch_sizes": [1, 8], "seconds": 5.0}),
        (["benchmark", "x"], {"batch_sizes": [1, 8]}),
        (["predict", "x", "--labels", "a cat", "dog", "--json", "in.png"], {"labels": ["a cat", "dog"]}),
        (["fuse", "x", "y", "--output", "z"], {"shared": ["embeddings", "layernorm", "mlp"], "members": ["x", "y"]}),
        (["fuse", "x", "--shared", "mlp", "embeddings", "--output", "z"], {"shared": ["mlp", "embeddings"]}),
        (["fuse", "x", "--shared", "--output", "z"], {"shared": [""]}),
        (["prune", "x", "--objectives", "acc", "avg", *NEEDED], {"objectives": ["acc", "avg"], "budget": None}),
        (["prune", "x", "--budget", "best", *NEEDED], {"budget": "best"}),
        (["prune", "x", "--budget=3", *NEEDED], {"budget": 3}),
        (["finetune", "x", "--learning-rates", "grid", *NEEDED], {"learning_rates": ["grid"]}),
        (["analyse", "x", "--ood", "a=b", "--ood", "c=d", *NEEDED], {"ood": [("a", "b"), ("c", "d")], "limit": 2_000}),
        (["build", "x", "y", "--target", "cost=1.3", *NEEDED], {"target": {"cost": 1.3}, "others": ["y"]}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_values_are_read(words, expected):
    values = parsed(words)
    found = {name: values[name] for name in expected}
    assert {name: list(each) if isinstance(each, tuple) else each for name, each in found.items()} == expected


def test_what_follows_two_dashes_is_no_list():
    assert repeat_flags(["x", "--", "--labels", "a", "b"]) == ["x", "--", "--labels", "a", "b"]


WRONG_CALLS = [
    ("", "Missing command"),
    ("unknown", "No such command 'unknown'"),
    ("prune", "Missing argument"),
    ("evaluate x --data y --near no-name", "'no-name' is not NAME=VALUE"),
    ("demo --limit 3", "No such option: --limit"),
    ("benchmark x --seconds -1", "-1 is not a time: pass 0 or more"),
    ("benchmark x --seconds nan", "nan is not a time"),
    ("benchmark x --batch-sizes 0", "Invalid value for '--batch-sizes'"),
    ("app x --port 0", "Invalid value for '--port'"),
    ("app x --port 70000", "Invalid value for '--port'"),
    ("serve x --port 70000", "Invalid value for '--port'"),
    ("app x --max-megabytes 0", "0 is not a size: pass a positive number"),
    ("app x --max-megabytes nan", "nan is not a size"),
    ("export x --to jpeg --output z", "'jpeg' is not one of onnx, torch"),
    ("fuse x --shared heads --output z", "'heads' is not one of embeddings, layernorm, mlp"),
    ("prune x NEEDED --seed -1", "Invalid value for '--seed'"),
    ("prune x NEEDED --budget most", "most is neither a positive number nor best"),
    ("prune x NEEDED --budget 0", "0 is neither a positive number nor best"),
    ("build x NEEDED --target cheap", "cheap is not a target: pass balance, quality, cost=1.3"),
    ("build x NEEDED --time-limit 0", "0 is not a time: pass more than 0 minutes"),
    ("evaluate x --data y --severities 6", "'6' is not a list of severities: pass some of 1 to 5, as 1,3,5"),
    ("calibrate x NEEDED --coverage 5", "5 is not a share between 0 and 1: pass 0.05 for 5 %"),
    ("calibrate x NEEDED --alpha ten", "ten is not a share between 0 and 1"),
    ("calibrate x NEEDED --detector vim", "'vim' is not one of"),
    *(
        (f"finetune x NEEDED --learning-rates {rate}", f"{rate} is not a learning rate")
        for rate in ("nan", "inf", "-0.1", "0", "fast")
    ),
]


@pytest.mark.parametrize(("words", "sentence"), WRONG_CALLS, ids=[words for words, _ in WRONG_CALLS])
def test_a_wrong_call_is_answered_with_one_sentence_and_2(words, sentence, fails):
    said = fails(*words.replace("NEEDED", " ".join(NEEDED)).split())
    assert said.startswith("hydra-transformers") and said.endswith(" --help)") and sentence in said
