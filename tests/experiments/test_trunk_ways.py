"""Three ways to a common first half of the layers: each makes what its row says, at the same cost."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from experiments import fine_tuning_tables as tables
from experiments.comparison import main
from experiments.methods import Comparison
from experiments.pretrained import SST2_GTE, TINYIMAGENET_DINOV2
from experiments.results import gather, write_results
from experiments.settings import SETTINGS
from experiments.smallest import SMALLEST, splits
from experiments.units import BEHIND_TRUNK, Unit, units_of


SETTING = replace(SMALLEST, groups=("trunk-ways",))


@pytest.mark.slow
def test_every_way_has_its_trunk_trains_behind_it_and_costs_the_same(tmp_path):
    comparison = Comparison(SETTING, splits(), tmp_path, "cpu", seeds=1, backbones=3)
    for unit in units_of(SETTING, seeds=1, backbones=3):
        comparison.run(unit)
    made = {name: make() for name, make in comparison.trunk_ways(0)}
    assert {name: each.config.trunk_layers for name, each in made.items()} == dict.fromkeys(made, 1)
    methods = gather(comparison.folder, "cpu")["seeds"]["0"]
    ways = ["trunk-one-backbone", "trunk-frozen", "trunk-merged"]
    assert len({methods[name]["multiply_adds"] for name in ways}) == 1
    assert {methods[name]["num_members"] for name in ways} == {3}
    assert methods["trunk-merged-whole"]["multiply_adds"] > methods["trunk-merged"]["multiply_adds"]
    rows = tables.trunk_way_rows(SETTING)
    assert set(rows) == set(made) and rows["trunk-frozen"] in tables.table({"0": methods}, rows, [tables.ACCURACY])
    start = comparison.once(comparison.start)
    for index in range(3):
        frozen = comparison.once(comparison.frozen, index)
        for name, parameter in frozen.base_model.named_parameters():
            if "k_proj.bias" not in name:
                is_frozen = name.startswith(("embeddings.", "layers.0."))
                assert torch.equal(parameter, start.base_model.get_parameter(name)) == is_frozen, name
    members = [comparison.once(comparison.member, Unit("member", 0, name)) for name in BEHIND_TRUNK]
    first = [member.vit.layers[0].state_dict() for member in members]
    assert all(torch.equal(first[0][name], each[name]) for each in first for name in first[0])
    assert all(len(member.config.kept_heads[0][0]) == 4 for member in members), "nothing is pruned in the trunk"
    assert all(len(member.config.kept_heads[1][0]) == 3 for member in members)


def test_what_the_group_adds_to_the_trainings():
    """Three fine-tunings with a frozen half and three members for each seed; the whole fine-tunings are the backbones."""
    for setting in (TINYIMAGENET_DINOV2, SST2_GTE):
        units = units_of(replace(setting, groups=("trunk-ways",)), seeds=3, backbones=9)
        kinds = [unit.kind for unit in units]
        assert {kind: kinds.count(kind) for kind in kinds} == {
            "backbone": 9,
            "frozen": 9,
            "circuit": 9 + 9 + 6,
            "member": 9,
            "judge": 3,
        }
        done = set()
        for unit, needs in units.items():
            assert set(needs) <= done
            done.add(unit)


def test_one_group_more_leaves_the_results_that_are_there(tmp_path):
    path, found = tmp_path / "setting.json", {"seeds": {"0": {"single": {"a": 1}}}, "circuits": {}, "machine": "old"}
    path.write_text(json.dumps(found))
    new = {"seeds": {"0": {"trunk-frozen": {"a": 2}}, "1": {}}, "circuits": {"0": {"trunk-avg": {}}}, "fusion": {}}
    write_results(new | {"machine": "new"}, path, ["trunk-ways"])
    joined = json.loads(path.read_text())
    assert joined["seeds"] == {"0": {"single": {"a": 1}, "trunk-frozen": {"a": 2}}, "1": {}}
    assert joined["machine"] == "old" and joined["added"] == {"trunk-ways": {"machine": "new"}}
    write_results(new | {"machine": "new"}, path)
    assert json.loads(path.read_text())["machine"] == "new", "without groups it is another run"


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--groups", "trunk-ways", "--settings", "cifar10-vit"],
            "cifar10-vit has no trunk-ways, pass some of untuned",
        ),
        (["--groups", "trunk", "--smallest"], "--smallest runs all of them"),
    ],
)
def test_groups_that_a_setting_does_not_have_are_refused(words, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["experiments", *words])
    with pytest.raises(SystemExit):
        main()
    assert sentence in capsys.readouterr().err
    assert "trunk-ways" not in SETTINGS["cifar10-vit"].groups
