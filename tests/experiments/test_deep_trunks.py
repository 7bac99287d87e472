"""Soups of members: each makes what its row says."""

from dataclasses import replace

import pytest

from experiments.deep_trunk_tables import deep_trunk_table, rows
from experiments.fine_tuning_tables import with_beside
from experiments.methods import Comparison
from experiments.pretrained import SST2_GTE, TINYIMAGENET_DINOV2
from experiments.results import gather
from experiments.smallest import SMALLEST, splits
from experiments.units import ensemble, six, units_of


GROUPS = ("soups",)
SETTING = replace(SMALLEST, groups=GROUPS)


@pytest.mark.slow
def test_every_method_is_judged_with_its_trainings_and_its_trunk(tmp_path):
    comparison = Comparison(SETTING, splits(), tmp_path, "cpu", seeds=1, backbones=3)
    for unit in units_of(SETTING, seeds=1, backbones=3):
        comparison.run(unit)
    methods = gather(comparison.folder, "cpu")["seeds"]["0"]
    made = {name: make for group in GROUPS for name, make, _ in getattr(comparison, group.replace("-", "_"))(0)}
    assert {name for name in methods if not name.endswith("temperature")} == set(made)
    assert not any("shift" in run for run in methods.values())
    for name in ("three-trunk-1", "six-trunk-1"):
        assert methods[name]["num_members"] == 3 and made[name]().config.trunk_layers == 1
        assert methods[name]["multiply_adds"] == methods["three-trunk-1"]["multiply_adds"]
        tempered = methods[f"{name}-temperature"]
        assert (
            tempered["temperature"] > 0 and methods[name]["temperature"] == 1 and {"ece", "nll"} <= set(tempered["id"])
        )
    trainings = {name: run["trainings"] for name, run in methods.items()}
    assert trainings["three-single"] == 1 and trainings["three-trunk-0"] == 3 and trainings["six-trunk-0"] == 6
    text = deep_trunk_table(with_beside({"0": methods}), SETTING)
    assert set(rows(SETTING)) >= set(made) and len(text.splitlines()) == 2 + len(made), "a row for every method"
    assert "| one fine-tuning | 1.00 | 1.00 |" in text


def test_what_the_groups_add_to_the_trainings():
    for setting in (TINYIMAGENET_DINOV2, SST2_GTE):
        chosen = [group for group in GROUPS if group in setting.groups]
        units = units_of(replace(setting, groups=tuple(chosen)), seeds=3, backbones=18)
        kinds = [unit.kind for unit in units]
        assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {
            "backbone": 18,
            "judge": 3 * len(chosen),
        }
        done = set()
        for unit, needs in units.items():
            assert set(needs) <= done
            done.add(unit)


def test_no_two_seeds_share_one_of_their_six_fine_tunings():
    found = [six(seed, 3, 18) for seed in range(3)]
    assert sorted(index for each in found for index in each) == list(range(18))
    assert all(each[:3] == ensemble(seed, 3, 9) for seed, each in enumerate(found)), "the same three as with nine"
    assert six(0, 1, 3) == [0, 1, 2, 0, 1, 2]
