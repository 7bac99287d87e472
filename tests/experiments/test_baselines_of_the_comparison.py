"""The comparison's group of baselines by itself, and adding a group to the results that are there."""

import argparse
import json
from dataclasses import replace

import pytest

from experiments.comparison import units_to_do
from experiments.results import added
from experiments.settings import SETTINGS
from experiments.units import Unit


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
