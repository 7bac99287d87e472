"""The comparison's group of baselines, run on a tiny stand-in; and adding a group to what is there."""

import argparse
import json
from dataclasses import replace

import pytest

from experiments import fine_tuning_tables, tables
from experiments.comparison import units_to_do
from experiments.methods import Comparison
from experiments.results import added, gather
from experiments.settings import SETTINGS
from experiments.smallest import SMALLEST, splits
from experiments.units import Unit, units_of


ALONE = replace(SMALLEST, groups=("baselines",))
ROWS = {"batch-ensemble": 3, "mimo": 3, "heads": 3, "packed": 3, "lora-single": 1}


@pytest.mark.slow
def test_the_baselines_are_trained_and_judged(tmp_path):
    comparison = Comparison(ALONE, splits(), tmp_path, "cpu", seeds=1, backbones=3)
    for unit in units_of(ALONE, seeds=1, backbones=3):
        comparison.run(unit)
    methods = gather(tmp_path, "cpu")["seeds"]["0"]
    assert {name: methods[name]["num_members"] for name in ROWS} == ROWS
    single = methods["lora-single"]["multiply_adds"]
    ratios = {name: methods[name]["multiply_adds"] / single for name in ROWS}
    assert ratios["packed"] < ratios["heads"] < ratios["mimo"] < 1.5 < ratios["batch-ensemble"] < 3
    assert {*ROWS} <= {*tables.COMPARED} and {*ROWS} - {"packed"} <= {*fine_tuning_tables.BASELINES}
    again = Comparison(ALONE, splits(), tmp_path, "cpu", seeds=1, backbones=3)
    for unit in units_of(ALONE, seeds=1, backbones=3):
        again.run(unit)  # from what lies there


@pytest.mark.parametrize("name", ["tinyimagenet-dinov2", "sst2-gte"])
def test_a_group_alone_trains_what_it_needs_and_nothing_else(name):
    arguments = argparse.Namespace(seeds=3, backbones=9, groups=["baselines"], smallest=False)
    units = units_to_do(replace(SETTINGS[name], groups=("baselines",)), arguments)
    kinds = [unit.kind for unit in units]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"backbone": 3, "baseline": 9, "lora": 3, "judge": 3}
    assert units[Unit("baseline", 1, "mimo")] == [] and units[Unit("baseline", 1, "heads")] == [Unit("backbone", 1)]


def test_what_is_found_is_added_to_the_results_file(tmp_path):
    path = tmp_path / "setting.json"
    before = {"machine": "old", "seeds": {"0": {"single": 1}, "1": {"single": 2}}, "circuits": {"0": {}}, "fusion": {}}
    path.write_text(json.dumps(before))
    found = {"machine": "new", "seeds": {"0": {"mimo": 3}, "1": {"mimo": 4}}, "circuits": {}, "fusion": {}}
    result = added(found, path, ["baselines"])
    assert result["seeds"] == {"0": {"single": 1, "mimo": 3}, "1": {"single": 2, "mimo": 4}}
    assert result["machine"] == "old" and result["circuits"] == {"0": {}}
    assert result["added"] == [{"groups": ["baselines"], "machine": "new"}]
    with pytest.raises(ValueError, match="has the seeds 0, 1: add methods with the same --seeds"):
        added(found | {"seeds": {"2": {}}}, path, ["baselines"])
    assert added(found, tmp_path / "none.json", ["baselines"]) == found
