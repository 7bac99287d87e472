"""The comparison's group of baselines by itself."""

import argparse
from dataclasses import replace

import pytest

from experiments.comparison import units_to_do
from experiments.settings import SETTINGS
from experiments.units import Unit


@pytest.mark.parametrize("name", ["tinyimagenet-dinov2", "sst2-gte"])
def test_a_group_alone_trains_what_it_needs_and_nothing_else(name):
    arguments = argparse.Namespace(seeds=3, backbones=9, groups=["baselines"], smallest=False)
    units = units_to_do(replace(SETTINGS[name], groups=("baselines",)), arguments)
    kinds = [unit.kind for unit in units]
    assert {kind: kinds.count(kind) for kind in set(kinds)} == {"backbone": 3, "baseline": 9, "lora": 3, "judge": 3}
    assert units[Unit("baseline", 1, "mimo")] == [] and units[Unit("baseline", 1, "heads")] == [Unit("backbone", 1)]
