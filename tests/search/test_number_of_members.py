"""Fewer members are tried too, wherever the search runs."""

from dataclasses import replace

import pytest
import torch

from hydra_transformers import AutoHydra, hydrate
from hydra_transformers.reports.evaluation import evaluate_uncertainty
from hydra_transformers.search import results, strategy
from hydra_transformers.search.model_builder import ModelBuilder
from hydra_transformers.search.sources import held_out
from hydra_transformers.search.strategy import Search
from hydra_transformers.uncertainty import calibrate
from tests.search.tiny import FAST, fine_tunings, id_rows, ood_rows


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Three fine-tunings by name, on the device; two trunks, one budget, no plots."""
    folder = tmp_path_factory.mktemp("hydrated")
    for place, model in enumerate(fine_tunings("vit", 3)):
        model.save_pretrained(folder / f"model-{place}")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(strategy, "budgets_of", lambda config, trunk_layers: [1])
        patched.setattr(results.importlib.util, "find_spec", lambda name: None)
        names = [folder / f"model-{place}" for place in range(3)]
        data = {"data": id_rows("vit"), "ood_data": ood_rows("vit")}
        return hydrate(names, **data, target={"cost": 100}, output_dir=folder / "hydra", device=DEVICE, **FAST)


@pytest.mark.slow
def test_the_best_are_tried_with_the_first_two_of_their_three_members(found):
    hydras = [each for each in found.table if each.is_hydra]
    three, two = ([each.design for each in hydras if each.design.members == count] for count in (3, 2))
    assert 1 <= len(two) <= 4 and {each.members for each in three + two} == {2, 3}
    whole = {(each.trunk_layers, each.pruned_by, each.budget) for each in three}
    assert {(each.trunk_layers, each.pruned_by, each.budget) for each in two} <= whole
    best = max(hydras, key=lambda each: (each.design.members == 3, each.quality, -each.nll, -each.time))
    assert any(each.trunk_layers == best.design.trunk_layers and each.budget == best.design.budget for each in two)
    assert found.hydra.num_members == found.chosen.design.members


@pytest.mark.slow
def test_fewer_members_are_the_first_ones_and_evaluated_as_if_there_were_no_others(found):
    """By hand, on the CPU: whole models, so that no device chose other heads."""
    row = next(each for each in found.table if each.is_hydra and each.design.members == 2 and not each.design.budget)
    data = held_out(id_rows("vit"), ood_rows("vit"), 3, 16, 0)
    trunk = row.design.trunk_layers if row.design.shared else None
    two = AutoHydra.from_pruned_members(fine_tunings("vit", 2), row.design.shared, trunk)
    calibrated = calibrate(two, data.calibration, batch_size=16).model
    [result] = evaluate_uncertainty(calibrated, data.evaluation, data.ood).models.values()
    assert row.accuracy == pytest.approx(result.id["accuracy"], abs=1 / 30)
    assert row.detection == pytest.approx(result.ood_average("OOD")["auroc"], abs=0.01)
    assert row.parameters == pytest.approx(two.num_parameters() / fine_tunings("vit", 1)[0].num_parameters())


@pytest.mark.slow
def test_everything_is_on_the_device_and_costs_are_measured_there(found):
    assert found.hydra.device.type == DEVICE
    assert all(each.milliseconds > 0 and each.megabytes > 0 and each.time > 0 for each in found.table)


@pytest.mark.slow
def test_circuits_belong_to_the_members_that_are_there(found):
    design = next(
        each.design for each in found.table if each.design.pruned_by == "circuits" and each.design.members == 3
    )
    of_three = ModelBuilder.__new__(ModelBuilder)

    class Ranked(str):
        def first(self, budget):
            return f"{self} {budget}"

    of_three._circuits = lambda design: list(map(Ranked, ("one", "two", "three")))
    assert of_three.circuits_of(replace(design, members=2)) == ["one 1", "two 1"]


@pytest.mark.slow
def test_copies_of_one_model_are_tried_in_smaller_numbers_and_one_of_each_is_tuned(tmp_path, monkeypatch):
    """Of four samples of a circuit the first two and three; tuned is no design twice."""
    [model] = fine_tunings("vit", 1)
    monkeypatch.setattr(strategy, "budgets_of", lambda config, trunk_layers: [] if trunk_layers else [2])
    monkeypatch.setattr(strategy, "NEAR", 100)
    monkeypatch.setattr(results.importlib.util, "find_spec", lambda name: None)
    tuned = []

    def evaluate_if_tuned(self, design, evaluate=Search.evaluate):
        if not design.tuned:
            return evaluate(self, design)
        tuned.append(design)

    monkeypatch.setattr(Search, "evaluate", evaluate_if_tuned)
    data = {"data": id_rows("vit"), "ood_data": ood_rows("vit"), "train_data": id_rows("vit", 8)}
    found = hydrate(model, **data, output_dir=tmp_path / "hydra", num_members=4, **FAST)
    assert sorted(each.design.members for each in found.table if each.is_hydra) == [2, 3, 4]
    assert len(tuned) == 1
