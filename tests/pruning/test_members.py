"""Members: cutting head sets out, drawing different ones and making them in one call."""

import math

import pytest
import torch
from torch.utils.data import DataLoader

from hydra_transformers import HydraCLIPModel, HydraViTForImageClassification, HydraViTModel
from hydra_transformers.data.batches import collate
from hydra_transformers.pruning import Circuit, draw_members, extract_circuit, prune_heads, taylor_prune
from hydra_transformers.pruning.members import half_of_each, make_members
from tests.families import VIT
from tests.pruning.backbones import clip, family, images, vit


RANKING = [(layer, head) for head in range(3) for layer in range(3)]


def circuit_of(ranking, objective="avg") -> Circuit:
    return Circuit(list(ranking), [0.5] * len(ranking), 0.6, objective)


def pruned_heads(member, heads=3) -> list[tuple[int, int]]:
    return [
        (layer, head)
        for layer, kept in enumerate(member.config.kept_heads)
        for head in range(heads)
        if head not in kept[0]
    ]


def test_prune_heads_finds_the_hydra_of_a_model_and_prunes_a_hydra_further():
    assert type(prune_heads(vit().vit, {0: [1]})) is HydraViTModel
    assert type(prune_heads(clip(), {"text": {0: [1]}})) is HydraCLIPModel
    once = prune_heads(vit(), {0: [1]})
    assert type(once) is HydraViTForImageClassification
    assert prune_heads(once, {0: [0], 2: [2]}).config.kept_heads == [[[2]], [[0, 1, 2]], [[0, 1]]]
    assert once.config.kept_heads == [[[0, 2]], [[0, 1, 2]], [[0, 1, 2]]]


def test_every_member_loses_as_many_heads_as_its_own_circuit_can_spare():
    scores = [[0.6, 0.8, 0.7, 0.1], [0.9, 0.8, 0.895, 0.2]]
    rankings = RANKING[:4], RANKING[4:8]
    circuits = [Circuit(ranking, each, 0.7, "avg") for ranking, each in zip(rankings, scores, strict=True)]
    assert [each.best_budget for each in circuits] == [each.largest_budget() for each in circuits] == [2, 1]
    members = draw_members(vit(), circuits=circuits, budget="best")
    assert [pruned_heads(member) for member in members] == [sorted(RANKING[:2]), RANKING[4:5]]
    members = draw_members(vit(), circuits=circuits, budget="best", tolerance=0.11)
    assert [len(pruned_heads(member)) for member in members] == [3, 3]


def test_samples_of_one_ranking_come_from_its_first_part_with_a_seed_each():
    arguments = {"circuit": circuit_of(RANKING), "budget": 3, "out_of": 6}
    members = draw_members(vit(), **arguments, num_members=4, seed=1)
    drawn = [pruned_heads(member) for member in members]
    assert all(len(heads) == 3 and set(heads) <= set(RANKING[:6]) for heads in drawn)
    assert len({tuple(heads) for heads in drawn}) > 1
    assert drawn == [pruned_heads(member) for member in draw_members(vit(), **arguments, num_members=4, seed=1)]
    alone = draw_members(vit(), **arguments, num_members=1, seed=3)
    assert pruned_heads(alone[0]) == drawn[2], "member m is drawn with the seed seed + m"


def test_samples_of_one_circuit_differ_as_long_as_they_can_and_equal_ones_are_refused_unless_asked_for():
    arguments = {"circuit": circuit_of(RANKING[:3]), "budget": 2, "seed": 0}
    members = draw_members(vit(), **arguments, num_members=3)
    assert len({str(member.config.kept_heads) for member in members}) == 3  # all that there are
    with pytest.raises(ValueError, match=r"members.\d. and members.\d. have the same heads and weights.*allow_equal"):
        draw_members(vit(), **arguments, num_members=4)
    assert len(draw_members(vit(), **arguments, num_members=4, allow_equal=True)) == 4


@pytest.mark.slow
def test_taylor_members_are_pruned_on_different_halves_of_the_data():
    model, batches, _, _ = family("vit")
    settings = {"heads_per_layer": 2, "seed": 4}
    members = draw_members(model, data=iter(batches), num_members=2, allow_equal=True, **settings)
    others = draw_members((vit(seed=1), vit(seed=2)), data=batches, **settings)  # each of several by its own scores
    expected = taylor_prune(vit(seed=2), half_of_each(batches, 5), heads_per_layer=2).heads_to_prune
    assert others[1].config.kept_heads == prune_heads(vit(), expected).config.kept_heads
    for seed, member in zip((4, 5), members, strict=True):
        generator = torch.Generator().manual_seed(seed)
        halves = []
        for batch in batches:
            rows = torch.randperm(len(batch["labels"]), generator=generator)[: math.ceil(len(batch["labels"]) / 2)]
            halves.append({name: value[rows.sort().values] for name, value in batch.items()})
        expected = taylor_prune(model, halves, heads_per_layer=2).heads_to_prune
        assert member.config.kept_heads == prune_heads(model, expected).config.kept_heads


@pytest.mark.slow
def test_members_behind_a_trunk_are_fused_with_it():
    behind = [head for head in RANKING if head[0] == 2]
    circuits = [circuit_of(behind), circuit_of(behind[::-1])]
    rows = [{"pixel_values": images(8, 0), "labels": torch.arange(8) % 5}]
    for members in (
        draw_members(vit(), circuits=circuits, budget=1, trunk_layers=2),
        draw_members(vit(), circuit=circuits[0], budget=1, num_members=3, trunk_layers=0.75),
        draw_members(vit(), data=rows, heads_per_layer=1, trunk_layers=2, allow_equal=True),
    ):
        assert {layer for member in members for layer, _ in pruned_heads(member)} == {2}
        assert HydraViTForImageClassification.from_pruned_members(members, allow_equal=True).config.trunk_layers >= 2


# Several fine-tunings


def fine_tunings(count: int = 3) -> list:
    """Models of one architecture with weights of their own."""
    return [vit(seed=seed) for seed in range(count)]


def test_several_backbones_lose_the_heads_of_their_own_circuits():
    backbones = fine_tunings()
    circuits = [circuit_of(RANKING[place:]) for place in range(3)]
    members = draw_members(backbones, circuits=circuits, budget=2)
    for backbone, circuit, member in zip(backbones, circuits, members, strict=True):
        expected = prune_heads(backbone, circuit.heads_to_prune(2))
        assert member.config.kept_heads == expected.config.kept_heads
        assert all(map(torch.equal, member.parameters(), expected.parameters()))
    hydra = HydraViTForImageClassification.from_pruned_members(members)
    assert hydra(pixel_values=images(2, 0)).member_logits.shape == (2, 3, 5)


def test_several_backbones_without_anything_else_are_members_as_they_are():
    backbones = fine_tunings()
    members = draw_members(backbones)
    inputs = images(3, 0)
    with torch.no_grad():
        for backbone, member in zip(backbones, members, strict=True):
            assert pruned_heads(member) == []
            torch.testing.assert_close(member(inputs).member_logits[:, 0], backbone(inputs).logits)


@pytest.mark.slow
def test_members_with_equal_heads_are_refused_only_with_equal_weights():
    backbones = fine_tunings(2)
    same = [circuit_of(RANKING), circuit_of(RANKING)]
    members = draw_members(backbones, circuits=same, budget=2)
    assert members[0].config.kept_heads == members[1].config.kept_heads
    for arguments in ({}, {"circuits": same, "budget": 2}):
        with pytest.raises(ValueError, match=r"have the same heads and weights.*allow_equal"):
            draw_members([vit(), vit()], **arguments)
        assert len(draw_members([vit(), vit()], **arguments, allow_equal=True)) == 2


def test_circuits_of_other_weights_cause_a_warning(recwarn):
    backbones = fine_tunings(2)
    batch = {"pixel_values": images(4, 0), "labels": torch.arange(4) % 3}
    circuits = [extract_circuit(each, [batch], budget=3) for each in backbones]
    draw_members(backbones, circuits=circuits, budget=2, allow_equal=True)
    assert not [each for each in recwarn if "other weights" in str(each.message)]
    with pytest.warns(UserWarning, match=r"circuits\[1\] was extracted from a model with other weights"):
        draw_members(backbones, circuits=circuits[::-1], budget=2, allow_equal=True)
    with pytest.warns(UserWarning, match=r"circuits\[0\] was extracted from a model with other weights"):
        draw_members(backbones[1], circuits=circuits[:1], budget=2)


# In one call


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

    monkeypatch.setattr("hydra_transformers.pruning.members.extract_circuit", extract)
    return objectives


@pytest.mark.parametrize(
    ("count", "settings", "objectives", "members"),
    [
        (1, {"method": "circuits"}, ["acc"], 3),
        (1, {"method": "circuits", "num_members": 2}, ["acc"], 2),
        (1, {"ood_data": OOD}, ["acc", "ood", "avg"], 3),
        (1, {"ood_data": OOD, "num_members": 5}, ["avg"], 5),
        (2, {"method": "circuits"}, ["acc"] * 2, 2),
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


@pytest.mark.parametrize("count", [1, 2])
def test_without_ood_data_members_are_those_of_taylor_scores(called, count):
    made = make_members(models(count), ROWS, num_members=2, seed=3)
    source = models(2) if count == 2 else models(1)[0]
    expected = draw_members(
        source, data=DataLoader(ROWS, 32, collate_fn=collate), heads_per_layer=3, num_members=2, seed=3
    )
    assert [each.config.kept_heads for each in made] == [each.config.kept_heads for each in expected]
    assert called == [], "no circuit was extracted"
    assert {len(heads) for member in made for [heads] in member.config.kept_heads} == {3}, (
        "two thirds of four, rounded"
    )


def test_members_with_equal_heads_by_taylor_scores_cause_a_warning():
    """One row in each batch: the random halves are the same."""
    with pytest.warns(UserWarning, match=r"members\[0\] and members\[1\] keep the same heads: fine-tune them"):
        members = make_members(models(1), ROWS[:1], num_members=2)
    assert members[0].config.kept_heads == members[1].config.kept_heads
    with pytest.raises(ValueError, match="have the same heads and weights"):
        HydraViTForImageClassification.from_pruned_members(members)


def test_options_of_the_other_method_are_refused():
    with pytest.raises(
        ValueError, match="budget is 2, and the method is taylor: leave it out, or pass method='circuits'"
    ):
        make_members(models(1), ROWS, budget=2)
    with pytest.raises(ValueError, match="heads_per_layer is 2, and the method is circuits"):
        make_members(models(1), ROWS, OOD, heads_per_layer=2)
    with pytest.raises(ValueError, match="ood_data is for the method circuits"):
        make_members(models(1), ROWS, OOD, method="taylor")
    with pytest.raises(ValueError, match="method is 'magnitude': pass 'circuits' or 'taylor'"):
        make_members(models(1), ROWS, method="magnitude")
