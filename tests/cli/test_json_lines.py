"""`predict --json`: each line is JSON, whatever the model answers."""

import json

import torch

from hydra_transformers.cli import main
from hydra_transformers.models.auto import load_trained
from tests.tiny_data import save_bert


def not_a_number(name: str):
    raise AssertionError(f"{name} is no JSON")


def test_what_is_no_number_is_null(tmp_path, capsys):
    folder = save_bert(tmp_path)
    broken = load_trained(folder)
    with torch.no_grad():
        broken.classifier.bias.fill_(torch.nan)
    broken.save_pretrained(folder)
    assert main(["predict", str(folder), "a film", "joy", "--json", "--device", "cpu"]) == 0
    lines = [json.loads(line, parse_constant=not_a_number) for line in capsys.readouterr().out.splitlines()]
    assert [line["input"] for line in lines] == ["a film", "joy"]
    assert {line["score"] for line in lines} == {None}
