"""Members in one call: defaults, circuits that are kept in a folder, and refusals before any work."""

import pytest
import torch

from hydra_transformers.pruning import Circuit, draw_members, extract_circuit, make_members, making, taylor_prune
from hydra_transformers.pruning.members import half_of_each
from tests.families import BERT, VIT


torch.manual_seed(0)
ROWS = [{"pixel_values": image, "labels": row % 5} for row, image in enumerate(torch.randn(9, 3, 8, 8))]
OOD = [{"pixel_values": image} for image in torch.randn(6, 3, 8, 8)]


def models(count: int) -> list:
    return [VIT.backbone(seed).float() for seed in range(count)]


@pytest.fixture
def called(monkeypatch) -> list[str]:
    """The objectives that circuits would be extracted for."""
    objectives = []

    def extract(model, data, ood_data, objective, *, budget, **options) -> Circuit:
        objectives.append(objective)
        order = [(layer, (head + len(objectives)) % 4) for head in range(4) for layer in range(3)]
        return Circuit(order[:budget], [0.5] * budget, 0.5, objective)

    monkeypatch.setattr(making, "extract_circuit", extract)
    return objectives


@pytest.mark.parametrize(
    ("count", "settings", "objectives", "members"),
    [
        (1, {}, ["acc"], 3),
        (1, {"num_members": 2}, ["acc"], 2),
        (1, {"ood_data": OOD}, ["acc", "ood", "avg"], 3),
        (1, {"ood_data": OOD, "num_members": 5}, ["avg"], 5),
        (1, {"ood_data": OOD, "objectives": ["acc", "avg"]}, ["acc", "avg"], 2),
        (2, {}, ["acc"] * 2, 2),
        (2, {"ood_data": OOD}, ["avg"] * 2, 2),
    ],
)
def test_objectives_members_and_budget_by_default(called, count, settings, objectives, members):
    made = make_members(models(count), ROWS, **settings)
    assert called == objectives and len(made) == members
    assert {sum(len(layer[0]) for layer in member.config.kept_heads) for member in made} == {10}  # of 12


@pytest.mark.slow
def test_several_models_are_pruned_by_their_circuits_which_stay_in_the_folder(tmp_path):
    several = models(2)
    members = make_members(several, ROWS, OOD, budget=2, folder=tmp_path)
    circuits = [extract_circuit(each, ROWS, OOD, "avg", budget=2) for each in several]
    expected = draw_members(several, circuits=circuits, budget=2)
    assert [each.config.kept_heads for each in members] == [each.config.kept_heads for each in expected]
    saved = [Circuit.load(tmp_path / "circuits" / f"member-{index}.json") for index in range(2)]
    assert [each.ranking for each in saved] == [each.ranking for each in circuits]
    again = make_members(several, ROWS, OOD, budget=2, folder=tmp_path)
    assert [each.config.kept_heads for each in again] == [each.config.kept_heads for each in members]


@pytest.mark.slow
def test_taylor_keeps_two_thirds_by_default():
    [model] = models(1)
    [member] = make_members([model], ROWS, method="taylor", num_members=1, batch_size=9)
    batch = {name: torch.stack([torch.as_tensor(row[name]) for row in ROWS]) for name in ROWS[0]}
    expected = taylor_prune(model, half_of_each([batch], 0), heads_per_layer=3).heads_to_prune
    kept = [[head for head in range(4) if head not in expected.get(layer, [])] for layer in range(3)]
    assert [layer[0] for layer in member.config.kept_heads] == kept


@pytest.mark.parametrize(
    ("count", "settings", "problem"),
    [
        (1, {"budget": 12}, "budget is 12: 12 heads compete, so pass 1 to 11"),
        (1, {"budget": 11}, "there are only 1 ways to lose 11 of 11 heads, for 3 members"),
        (1, {"method": "taylor", "budget": 2}, "are for circuits: pass heads_per_layer with taylor"),
        (1, {"method": "taylor", "heads_per_layer": 4}, "heads_per_layer is 4: as many as a layer has cut nothing"),
        (1, {"heads_per_layer": 2}, "pass 'circuits' with a budget, or 'taylor' with heads_per_layer"),
        (1, {"method": "magic"}, "method is 'magic'"),
        (1, {"objectives": ["acc", "ood"]}, "need out-of-distribution data: pass ood_data"),
        (1, {"trunk_layers": 3}, "trunk_layers is 3"),
        (
            1,
            {"ood_data": OOD, "objectives": ["acc", "ood"], "num_members": 3},
            "num_members is 3, and there are 2 circ",
        ),
        (2, {"num_members": 3}, "num_members is 3, and there are 2 circuits"),
        (2, {"ood_data": OOD, "objectives": ["acc", "ood"]}, "each of 2 models gets one circuit"),
    ],
)
def test_contradictions_are_refused_before_any_work(called, count, settings, problem):
    with pytest.raises(ValueError, match=problem):
        make_members(models(count), ROWS, **settings)
    assert called == []


def test_models_that_cannot_be_fused_are_refused_before_any_work(called):
    with pytest.raises((TypeError, ValueError), match=r"models\[1\] is a BertForSequenceClassification"):
        make_members([VIT.backbone(), BERT.backbone()], ROWS)
    assert called == []
