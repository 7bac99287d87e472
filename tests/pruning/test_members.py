"""Members: cutting head sets out, drawing different ones, and how different they are."""

import math

import numpy as np
import pytest
import torch

from hydra_transformers import HydraCLIPModel, HydraViTForImageClassification, HydraViTModel
from hydra_transformers.pruning import (
    Circuit,
    draw_members,
    extract_circuit,
    layer_divergence,
    overlap,
    prune_heads,
    taylor_prune,
)
from hydra_transformers.pruning.members import half_of_each
from tests.pruning.backbones import bert, clip, family, images, vit


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


def test_prune_heads_finds_the_hydra_of_a_model():
    assert type(prune_heads(vit(), {0: [1]})) is HydraViTForImageClassification
    assert type(prune_heads(vit().vit, {0: [1]})) is HydraViTModel
    assert type(prune_heads(clip(), {"text": {0: [1]}})) is HydraCLIPModel
    assert type(prune_heads(bert())).__name__ == "HydraBertForSequenceClassification"
    with pytest.raises(TypeError, match="model is a Linear: pass a Hydra or one of ASTForAudioClassification"):
        prune_heads(torch.nn.Linear(2, 2))


def test_every_member_loses_as_many_heads_as_its_own_circuit_can_spare():
    scores = [[0.6, 0.8, 0.7, 0.1], [0.9, 0.8, 0.895, 0.2]]
    rankings = RANKING[:4], RANKING[4:8]
    circuits = [Circuit(ranking, each, 0.7, "avg") for ranking, each in zip(rankings, scores, strict=True)]
    assert [each.best_budget for each in circuits] == [each.largest_budget() for each in circuits] == [2, 1]
    members = draw_members(vit(), circuits=circuits, budget="best")
    assert [len(pruned_heads(member)) for member in members] == [2, 1]
    members = draw_members(vit(), circuits=circuits, budget="best", tolerance=0.11)
    assert [len(pruned_heads(member)) for member in members] == [3, 3]
    hydra = HydraViTForImageClassification.from_pruned_members(
        draw_members(vit(), circuits=circuits, budget="best", trunk_layers=0)
    )
    assert hydra.num_members == 2


def test_a_circuit_is_drawn(tmp_path):
    circuit = Circuit(RANKING[:3], [0.6, 0.8, 0.3], 0.7, "acc", chance_from=3)
    path = circuit.plot(tmp_path / "circuit.png")
    assert path.read_bytes().startswith(b"\x89PNG") and [each.name for each in tmp_path.iterdir()] == ["circuit.png"]


def test_prune_heads_prunes_a_hydra_further():
    once = prune_heads(vit(), {0: [1]})
    assert prune_heads(once, {0: [0], 2: [2]}).config.kept_heads == [[[2]], [[0, 1, 2]], [[0, 1]]]
    assert once.config.kept_heads == [[[0, 2]], [[0, 1, 2]], [[0, 1, 2]]]


def test_one_member_per_circuit():
    circuits = [circuit_of(RANKING, "acc"), circuit_of(RANKING[::-1], "ood"), circuit_of(RANKING[3:], "avg")]
    members = draw_members(vit(), circuits=circuits, budget=3)
    assert [pruned_heads(member) for member in members] == [sorted(each.ranking[:3]) for each in circuits]
    hydra = HydraViTForImageClassification.from_pruned_members(members)
    assert hydra(pixel_values=images(2, 0)).member_logits.shape == (2, 3, 5)


def test_samples_of_one_ranking_come_from_its_first_part_with_a_seed_each():
    arguments = {"circuit": circuit_of(RANKING), "budget": 3, "out_of": 6}
    members = draw_members(vit(), **arguments, num_members=4, seed=1)
    drawn = [pruned_heads(member) for member in members]
    assert all(len(heads) == 3 and set(heads) <= set(RANKING[:6]) for heads in drawn)
    assert len({tuple(heads) for heads in drawn}) > 1
    assert drawn == [pruned_heads(member) for member in draw_members(vit(), **arguments, num_members=4, seed=1)]
    alone = draw_members(vit(), **arguments, num_members=1, seed=3)
    assert pruned_heads(alone[0]) == drawn[2], "member m is drawn with the seed seed + m"


@pytest.mark.slow
def test_taylor_members_are_pruned_on_different_halves_of_the_data():
    model, batches, _, _ = family("vit")
    members = draw_members(model, data=iter(batches), heads_per_layer=2, num_members=2, seed=4, allow_equal=True)
    for seed, member in zip((4, 5), members, strict=True):
        generator = torch.Generator().manual_seed(seed)
        halves = []
        for batch in batches:
            rows = torch.randperm(len(batch["labels"]), generator=generator)[: math.ceil(len(batch["labels"]) / 2)]
            halves.append({name: value[rows.sort().values] for name, value in batch.items()})
        expected = taylor_prune(model, halves, heads_per_layer=2).heads_to_prune
        assert member.config.kept_heads == prune_heads(model, expected).config.kept_heads


def test_clip_members_differ_in_the_vision_tower_alone():
    model, batches, _, prompts = family("clip")
    members = draw_members(
        model, data=batches, heads_per_layer=1, num_members=2, class_prompts=prompts, allow_equal=True
    )
    assert all(member.config.kept_heads["text"] == [[[0, 1]], [[0, 1]]] for member in members)
    assert all(sum(len(layer[0]) for layer in member.config.kept_heads["vision"]) == 2 for member in members)


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
    for arguments in ({"circuits": [circuits[0], circuit_of(RANKING)]}, {"circuit": circuit_of(RANKING)}):
        with pytest.raises(ValueError, match=r"ranks head \(0, 0\), which is in the first 2 layers"):
            draw_members(vit(), **arguments, budget=1, trunk_layers=0.75)


def test_members_with_the_same_heads_are_refused_unless_asked_for():
    arguments = {"circuit": circuit_of(RANKING), "budget": 4, "out_of": 4}
    with pytest.raises(
        ValueError, match=r"members\[0\] and members\[1\] have the same heads and weights.*allow_equal"
    ):
        draw_members(vit(), **arguments)
    members = draw_members(vit(), **arguments, allow_equal=True)
    assert [pruned_heads(member) for member in members] == [sorted(RANKING[:4])] * 3


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
def test_several_backbones_are_pruned_by_taylor_scores_of_their_own():
    _, batches, _, _ = family("vit")
    backbones = fine_tunings(2)
    members = draw_members(tuple(backbones), data=batches, heads_per_layer=2, seed=4)
    for place, (backbone, member) in enumerate(zip(backbones, members, strict=True)):
        half = half_of_each(batches, 4 + place)
        expected = taylor_prune(backbone, half, heads_per_layer=2).heads_to_prune
        assert member.config.kept_heads == prune_heads(backbone, expected).config.kept_heads


def test_a_batch_with_fewer_labels_than_rows_is_no_calibration():
    with pytest.raises(ValueError, match="has 3 rows, and 2 as its labels: pass one each"):
        half_of_each([{"pixel_values": torch.zeros(3, 1), "labels": torch.zeros(2)}], 0)


@pytest.mark.slow
def test_members_with_equal_heads_are_refused_only_with_equal_weights():
    backbones, same = fine_tunings(2), [circuit_of(RANKING), circuit_of(RANKING)]
    members = draw_members(backbones, circuits=same, budget=2)
    assert members[0].config.kept_heads == members[1].config.kept_heads
    for arguments in ({}, {"circuits": same, "budget": 2}):
        with pytest.raises(
            ValueError, match=r"members\[0\] and members\[1\] have the same heads and weights.*allow_equal"
        ):
            draw_members([vit(), vit()], **arguments)
        assert len(draw_members([vit(), vit()], **arguments, allow_equal=True)) == 2
    other = [circuit_of(RANKING), circuit_of(RANKING[1:])]
    assert len(draw_members([vit(), vit()], circuits=other, budget=2)) == 2


@pytest.mark.slow
def test_bad_arguments_get_one_sentence():
    one, ones = circuit_of(RANKING), [circuit_of(RANKING)]
    several = fine_tunings()
    for model, arguments, sentence in (
        (several, {"circuit": one, "budget": 2}, "circuit is a single one, and there are 3 backb"),
        (several, {"circuits": ones * 2, "budget": 2}, "are 3 backbones, and circuits has 2"),
        (several, {"circuits": one, "budget": 2}, "circuits is a single circuit"),
        (several, {"circuits": ones * 3}, "budget is missing"),
        (several, {"budget": 2}, "budget is 2, which drawing from nothing has no use for: .* circuits or data"),
        (several, {"num_members": 2}, "num_members is 2, and there are 3 backbones"),
        ([], {}, "model is an empty list"),
        (vit(), {"circuit": one, "budget": 2, "num_members": 0}, "num_members is 0"),
        ([vit(), bert()], {}, r"model\[1\] is a BertForSequenceClassification"),
        ([vit(), vit().vit], {}, r"model\[1\]"),
        ([vit(), "folder"], {}, r"model\[1\] is a str: pass"),
        (vit(), {}, "nothing to draw from"),
        (vit(), {"circuit": one, "data": [], "budget": 1}, "circuit and data"),
        (vit(), {"circuit": one}, "budget is missing"),
        (vit(), {"circuit": one, "budget": 5, "out_of": 4}, "budget is 5: heads are sampled from the first 4"),
        (vit(), {"circuit": one, "budget": 5, "out_of": 20}, "out_of is 20: this circuit ranks 9 heads"),
        (vit(), {"data": []}, "heads_per_layer is missing"),
        (vit(), {"circuits": ones, "budget": 2, "num_members": 7}, "num_members is 7, circuits has 1: each makes one"),
        (vit(), {"circuit": one, "budget": 2, "heads_per_layer": 1}, "heads_per_layer is 1, which drawing"),
        (vit(), {"data": [], "heads_per_layer": 2, "budget": 3}, "budget is 3, which drawing from data has no use"),
        (vit(), {"circuits": ["circuit.json"], "budget": 2}, r"circuits\[0\] is a str: pass what extract_circuit"),
        (vit(), {"circuits": ones, "budget": 2.5}, "budget is 2.5: pass a whole number, 0 to 9"),
        (vit(), {"circuits": ones, "budget": "most"}, "budget is 'most': pass a whole number, 0 to 9"),
        (vit(), {"circuit": one, "budget": "3"}, "budget is '3': pass a whole number, 1 to 9"),
        (vit(), {"circuit": one, "budget": "best"}, r"'best', which each of several circuits has: pass circuits=\["),
        (
            vit(),
            {"circuits": ones, "budget": 3, "tolerance": 0.1},
            r"tolerance is 0\.1, which goes with budget='best'",
        ),
    ):
        with pytest.raises((ValueError, TypeError), match=sentence):
            draw_members(model, **arguments)
    with pytest.raises(ValueError, match="tolerance is -1: pass how much of the score may be lost"):
        one.largest_budget(-1)


def test_whole_numbers_of_numpy_are_numbers_and_the_number_of_circuits_may_be_said():
    members = draw_members(vit(), circuits=[circuit_of(RANKING)], budget=np.int64(2), num_members=1)
    assert [pruned_heads(member) for member in members] == [RANKING[:2]]


def test_circuits_of_other_weights_cause_a_warning(recwarn):
    backbones, batch = fine_tunings(2), {"pixel_values": images(4, 0), "labels": torch.arange(4) % 3}
    circuits = [extract_circuit(each, [batch], budget=3) for each in backbones]
    draw_members(backbones, circuits=circuits, budget=2, allow_equal=True)
    assert not [each for each in recwarn if "other weights" in str(each.message)]
    with pytest.warns(UserWarning, match=r"circuits\[1\] was extracted from a model with other weights"):
        draw_members(backbones, circuits=circuits[::-1], budget=2, allow_equal=True)
    with pytest.warns(UserWarning, match=r"circuits\[0\] was extracted from a model with other weights"):
        draw_members(backbones[1], circuits=circuits[:1], budget=2)


def test_overlap_is_the_share_of_common_heads():
    assert overlap({0: [1, 2], 3: [0]}, {0: [2], 3: [0]}) == pytest.approx(2 / 3)
    assert overlap({0: [1]}, {1: [1]}) == 0
    assert overlap({"vision": {0: [1]}}, {"text": {0: [1]}}) == 0
    assert overlap({}, {}) == overlap({0: [1]}, {0: [1]}) == 1


def test_layer_divergence_is_jensen_shannon_in_nats():
    from scipy.spatial.distance import jensenshannon

    a, b = {0: [0, 1, 2], 1: [0]}, {0: [4], 2: [0, 1, 2, 3]}
    assert layer_divergence(a, b) == pytest.approx(jensenshannon([3, 1, 0], [1, 0, 4]) ** 2)
    assert layer_divergence(a, {0: [5, 6, 7], 1: [9]}) == 0
    assert layer_divergence({"vision": {0: [1]}}, {"text": {0: [1]}}) == pytest.approx(math.log(2))
    with pytest.raises(ValueError, match="heads_b names no head"):
        layer_divergence(a, {})


def test_samples_of_one_circuit_differ_as_long_as_they_can():
    model = vit()
    circuit = Circuit([(0, 0), (0, 1), (1, 2)], [0.5, 0.5, 0.5], 0.5, "acc")
    members = draw_members(model, circuit=circuit, budget=2, num_members=3, seed=0)
    assert len({str(member.config.kept_heads) for member in members}) == 3  # all that there are
    with pytest.raises(ValueError, match="have the same heads and weights"):
        draw_members(model, circuit=circuit, budget=2, num_members=4, seed=0)
