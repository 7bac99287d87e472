"""Soups of members, joint tuning and restarts of one run: each makes what its row says."""

from dataclasses import replace

import pytest
import torch

from experiments.deep_trunk_tables import deep_trunk_table, rows
from experiments.fine_tuning_tables import with_beside
from experiments.methods import Comparison
from experiments.pretrained import SST2_GTE, TINYIMAGENET_DINOV2
from experiments.results import gather
from experiments.smallest import SMALLEST, splits
from experiments.units import TRAININGS, Unit, ensemble, six, units_of


GROUPS = ("soups", "joint-tuning", "one-run")
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
    for name in ("three-trunk-1", "six-trunk-1", "joint-three-trunk-1", "restarts-trunk-1"):
        assert methods[name]["num_members"] == 3 and made[name]().config.trunk_layers == 1
        assert methods[name]["multiply_adds"] == methods["three-trunk-1"]["multiply_adds"]
        tempered = methods[f"{name}-temperature"]
        assert (
            tempered["temperature"] > 0 and methods[name]["temperature"] == 1 and {"ece", "nll"} <= set(tempered["id"])
        )
    trainings = {name: run["trainings"] for name, run in methods.items()}
    assert trainings["three-single"] == 1 and trainings["three-trunk-0"] == 3 and trainings["six-trunk-0"] == 6
    assert trainings["restarts-trunk-1"] == TRAININGS == 1.5
    # One epoch, as long as a fine-tuning here: its own work, and that of a teacher that runs forward only.
    one, own, teacher = (methods[name]["multiply_adds"] for name in ("three-single", "three-trunk-1", "three-trunk-0"))
    assert trainings["joint-three-trunk-1"] == pytest.approx(3 + (own + teacher / 3) / one, rel=1e-5)
    assert trainings["joint-labels-trunk-1"] == pytest.approx(3 + own / one, rel=1e-5)
    text = deep_trunk_table(with_beside({"0": methods}), SETTING)
    assert set(rows(SETTING)) == set(made) and len(text.splitlines()) == 2 + len(made), "a row for every method"
    assert (
        "| one fine-tuning | 1.00 | 1.00 |" in text and "| one run, three restarts, 1 layers merged | 1.50 |" in text
    )
    start, restarts = comparison.once(comparison.start, 0), comparison.once(comparison.restarts, 0)
    weights = [model.vit.layers[0].mlp.fc1.weight for model in (start, *restarts)]
    assert all(not torch.equal(weights[0], each) for each in weights[1:])
    assert not torch.equal(weights[1], weights[2])


def test_what_the_groups_add_to_the_trainings():
    for setting in (TINYIMAGENET_DINOV2, SST2_GTE):
        chosen = [group for group in GROUPS if group in setting.groups]
        units = units_of(replace(setting, groups=tuple(chosen)), seeds=3, backbones=18)
        kinds = [unit.kind for unit in units]
        assert {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)} == {
            "run": 3,
            "backbone": 18,
            "joint": 3 * (3 + 1),
            "judge": 3 * len(chosen),
        }
        done = set()
        for unit, needs in units.items():
            assert set(needs) <= done
            done.add(unit)
        assert units[Unit("joint", 1, "six")] == [Unit("backbone", index) for index in six(1, 3, 18)]


def test_no_two_seeds_share_one_of_their_six_fine_tunings():
    found = [six(seed, 3, 18) for seed in range(3)]
    assert sorted(index for each in found for index in each) == list(range(18))
    assert all(each[:3] == ensemble(seed, 3, 9) for seed, each in enumerate(found)), "the same three as with nine"
    assert six(0, 1, 3) == [0, 1, 2, 0, 1, 2]
