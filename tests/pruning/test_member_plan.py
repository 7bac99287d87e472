"""A plan of members: defaults, circuits that are kept in a folder, and refusals when it is made."""

import pytest
import torch
from transformers import ViTForImageClassification

from hydra_transformers.pruning import Circuit, MemberPlan, draw_members, extract_circuit
from hydra_transformers.pruning.member_plan import num_heads
from tests.families import VIT


ROWS = [{"pixel_values": image, "labels": row % 3} for row, image in enumerate(torch.randn(9, 3, 8, 8))]
FOREIGN = [{"pixel_values": image} for image in torch.randn(6, 3, 8, 8)]


def models(count: int) -> list[ViTForImageClassification]:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        config = VIT.backbone().config
        config.num_labels = 3
        made.append(ViTForImageClassification(config).eval())
    return made


@pytest.mark.parametrize(
    ("settings", "objectives", "members"),
    [
        ({}, ["acc"], 3),
        ({"num_members": 2}, ["acc"], 2),
        ({"has_ood_data": True}, ["acc", "ood", "avg"], 3),
        ({"has_ood_data": True, "num_members": 5}, ["avg"], 5),
        ({"has_ood_data": True, "objectives": ["acc", "avg"]}, ["acc", "avg"], 2),
        ({"num_models": 4}, ["acc"], 4),
        ({"num_models": 4, "has_ood_data": True}, ["avg"], 4),
        ({"method": "taylor"}, [], 3),
    ],
)
def test_objectives_and_members_by_default(settings, objectives, members):
    plan = MemberPlan(**settings)
    assert plan.chosen_objectives == objectives and plan.members == members


@pytest.mark.slow
def test_several_models_are_pruned_by_their_circuits_for_the_score_that_is_named(tmp_path):
    several, sentences = models(2), []
    plan = MemberPlan(num_models=2, has_ood_data=True, budget=2, score="energy")
    members = plan.make_members(several, ROWS, FOREIGN, folder=tmp_path, tell=sentences.append)
    settings = {"budget": 2, "score": "energy", "progress": False}
    circuits = [extract_circuit(each, ROWS, FOREIGN, "avg", **settings) for each in several]
    expected = draw_members(several, circuits=circuits, budget=2)
    assert [each.config.kept_heads for each in members] == [each.config.kept_heads for each in expected]
    found = [Circuit.load(tmp_path / "circuits" / f"member-{index}.json") for index in range(2)]
    assert [each.ranking for each in found] == [each.ranking for each in circuits]
    assert [each.made_from["score"] for each in found] == ["energy"] * 2
    assert [sentence.split(":")[0] for sentence in sentences] == [
        f"circuit of member {index} for avg" for index in range(2)
    ]


def test_numbers_are_checked_against_the_heads_of_a_model():
    [model] = models(1)
    every = num_heads(model.config)
    with pytest.raises(ValueError, match=f"budget is {every}: {every} heads compete"):
        MemberPlan(budget=every).check_heads(model.config, "vit")
    with pytest.raises(ValueError, match="budget is for the method circuits, not for taylor"):
        MemberPlan(method="taylor", budget=2)
    MemberPlan(budget=2).check_heads(model.config, "vit")
