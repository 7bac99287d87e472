"""Chosen groups of a comparison are added to the results that are there."""

import json
import sys
from dataclasses import replace

import pytest

from experiments.comparison import main
from experiments.pretrained import PRETRAINED
from experiments.results import write_results
from experiments.settings import SETTINGS
from experiments.units import ensemble, units_of


def test_one_group_more_leaves_the_results_that_are_there(tmp_path):
    path, found = tmp_path / "setting.json", {"seeds": {"0": {"single": {"a": 1}}}, "circuits": {}, "machine": "old"}
    path.write_text(json.dumps(found))
    new = {"seeds": {"0": {"tunings-whole-trunk-9": {"a": 2}}, "1": {}}, "circuits": {"0": {"avg": {}}}}
    write_results(new | {"machine": "new"}, path, ["trunk"])
    joined = json.loads(path.read_text())
    assert joined["seeds"] == {"0": {"single": {"a": 1}, "tunings-whole-trunk-9": {"a": 2}}, "1": {}}
    assert joined["machine"] == "old" and joined["added"] == {"trunk": {"machine": "new"}}
    write_results(new | {"machine": "new"}, path)
    assert json.loads(path.read_text())["machine"] == "new", "without groups it is another run"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--groups", "trunk", "--settings", "sst2"], "sst2 has no trunk, pass some of untuned"),
        (["--groups", "untuned", "--smallest"], "--smallest runs all of them"),
    ],
)
def test_groups_that_a_setting_does_not_have_are_refused(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    with pytest.raises(SystemExit):
        main()
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("name", PRETRAINED)
def test_of_pruned_fine_tunings_three_members_a_seed_are_trained(name):
    units = units_of(replace(SETTINGS[name], groups=("fine-tunings-tuned",)), seeds=3, backbones=9)
    members = sorted((unit.index, unit.name) for unit in units if unit.kind == "member")
    assert members == sorted((index, "circ-avg") for seed in range(3) for index in ensemble(seed, 3, 9))
    assert all(unit.kind != "circuit" for unit in units_of(replace(SETTINGS[name], groups=("trunk",)), 3, 9))
