"""The choice, the Pareto front and the division of data: pure functions."""

from itertools import chain

import pytest
import torch

from hydra_transformers.reports.gains import Gain
from hydra_transformers.search import Candidate, Design, choose, pareto_front, target_of
from hydra_transformers.search.candidates import HYDRA, ONE_MODEL, SOUP, budgets_of, near_front, trunk_depths
from hydra_transformers.search.choice import next_best, why
from hydra_transformers.search.results import candidate_table
from hydra_transformers.search.resuming import in_words
from hydra_transformers.search.sources import divided, held_out, rows_in, rows_of, select
from hydra_transformers.uncertainty.paired import Change
from tests.families import vit_backbone


def candidate(accuracy, auroc, time, kind=HYDRA, memory=1.0, budget=0):
    """In points of 100."""
    measured = {} if auroc is None else {"near": (auroc - 2) / 100, "far": (auroc + 2) / 100}
    design = Design(kind, 3, pruned_by="circuits" if budget else None, budget=budget)
    return Candidate(design, accuracy / 100, 1 - accuracy / 100, 0.1, 1.0, measured, time, memory)


SINGLE = candidate(70, 75, 1.0, ONE_MODEL)
WHOLE = candidate(73.6, 79.8, 2.8, memory=1.7)
HALF = candidate(73.4, 80.1, 1.8, memory=1.4, budget=1)
MOST = candidate(73.2, 80.0, 1.3, memory=1.1, budget=2)
POOR = candidate(71.9, 81.5, 1.2, memory=1.1, budget=3)
ALL = [SINGLE, WHOLE, HALF, MOST, POOR]


def chosen(target, candidates=ALL, has_ood_data=True):
    return choose(candidates, target_of(target, has_ood_data))


def test_balance_is_the_fastest_within_half_a_point_of_the_best_quality():
    assert WHOLE.quality == pytest.approx(0.767) and HALF.quality == pytest.approx(0.7675)
    assert chosen("balance") is POOR
    assert chosen("balance", [SINGLE, WHOLE, HALF, MOST]) is MOST
    slow = candidate(75, 82, 5.0)
    assert chosen("balance", [*ALL, slow]) is slow, "nothing else is within half a point"
    without = [candidate(accuracy, None, time) for accuracy, time in ((90, 3), (89.6, 2), (89, 1))]
    assert chosen("balance", without, has_ood_data=False) is without[1]


def test_a_cost_is_never_exceeded_and_the_best_below_it_is_chosen():
    assert chosen({"cost": 1.25}) is POOR
    assert chosen({"cost": 1.8}) is HALF and chosen({"cost": 1.79}) is POOR
    with pytest.raises(ValueError, match=r"no Hydra takes at most 1.1 times .* takes 1.20, so pass a higher cost"):
        chosen({"cost": 1.1})


def test_quality_is_the_best_detection_among_the_most_accurate():
    assert chosen("quality") is HALF and chosen({"accuracy_within": 0.5}) is HALF
    assert chosen({"accuracy_within": 2}) is POOR
    assert chosen({"accuracy_within": 0}) is WHOLE


def gains_over(chosen, candidates, reach=0.1):
    """Intervals of so many points on either side of the difference."""
    found = {}
    for each in candidates:
        if each is not chosen:
            difference = each.quality - chosen.quality
            found[each.name] = Gain("quality", Change(difference, difference - reach / 100, difference + reach / 100))
    return found


def said_of(chosen, candidates, reach=0.1):
    return why(chosen, candidates, target_of("balance", True), gains_over(chosen, candidates, reach))


def test_only_hydras_are_chosen_and_better_models_are_told_of():
    soup = candidate(80, 90, 0.9, SOUP)
    assert chosen("balance", [*ALL, soup]) is POOR
    sentence = said_of(POOR, [*ALL, soup])
    assert sentence.endswith(
        "But soup, which has no members to disagree, is no slower (0.90 times one model's time, accuracy 80.0, AUROC 90.0): "
        "better, +8.2 to +8.4 points."
    )
    assert "of 4 Hydras" in sentence and "But" not in said_of(POOR, ALL)
    with pytest.raises(ValueError, match="no Hydra could be made"):
        chosen("balance", [SINGLE, soup])


def test_a_difference_is_claimed_only_where_the_rows_can_show_it():
    sentence = said_of(POOR, ALL, reach=0.1)
    assert "The highest quality has Hydra of 3, 1 head pruned each (1.80 times" in sentence
    assert "AUROC 80.1): no difference that these rows can show." in sentence, "they differ by 0.05 points"
    assert (
        "Between it and 2 of the 3 other Hydras there is no difference that these rows can show in quality" in sentence
    )
    sure = said_of(POOR, ALL, reach=0.01)
    assert "AUROC 80.1): better, +0.0 to +0.1 points." in sure
    assert "Between it and 1 of the 3 other Hydras" in sure, "one has the same quality"
    few = said_of(POOR, ALL, reach=9)
    assert "Between it and 3 of the 3 other Hydras there is no difference" in few
    assert "But one model is no slower (1.00 times" in few and few.endswith(
        "): no difference that these rows can show."
    )


def test_alternatives_are_what_would_be_chosen_without_the_choice():
    target = target_of("balance", True)
    assert next_best(ALL, target) == [MOST, HALF, WHOLE]
    assert next_best(ALL, target_of({"cost": 1.3}, True)) == [MOST]


@pytest.mark.parametrize(
    ("target", "has_ood_data", "sentence"),
    [
        ("speed", True, "target is 'speed': pass \"balance\""),
        ({"cost": 1.3, "accuracy_within": 1}, True, 'pass "balance"'),
        ({"memory": 2}, True, 'pass "balance"'),
        (1.3, True, "target is 1.3: pass"),
        ({"cost": 0}, True, "cost 0, which nothing meets"),
        ({"cost": -1}, True, "cost -1: pass a number"),
        ({"cost": "low"}, True, "cost 'low': pass a number"),
        ({"cost": float("nan")}, True, "cost nan: pass a number"),
        ("quality", False, "without ood_data that is not measured"),
        ({"accuracy_within": 1}, False, "without ood_data that is not measured"),
    ],
)
def test_targets_that_say_nothing_are_refused(target, has_ood_data, sentence):
    with pytest.raises(ValueError, match=sentence):
        target_of(target, has_ood_data)


def test_the_front_has_all_that_no_other_beats():
    assert pareto_front(ALL) == [SINGLE, POOR, HALF]
    smaller = candidate(73.6, 79.8, 2.8, memory=1.0)
    assert smaller in pareto_front([*ALL, smaller]), "slower, but smaller and as good"
    assert pareto_front([WHOLE, WHOLE]) == [WHOLE, WHOLE], "equals do not beat each other"


def test_near_the_front_is_what_a_training_may_bring_there():
    weak = candidate(70, 76, 1.4, budget=5)
    assert not near_front(weak, ALL, points=2) and near_front(weak, ALL, points=4)
    assert near_front(candidate(60, 60, 0.5), ALL, points=1), "nothing is as fast"


def test_the_table_has_every_candidate_and_marks_front_and_choice():
    lines = candidate_table(ALL, pareto_front(ALL), POOR, gains_over(POOR, ALL)).splitlines()
    assert len(lines) == 2 + len(ALL) and "near-OOD AUROC" in lines[0]
    assert lines[3].startswith("| **Hydra of 3, 3 heads pruned each** | 1.20 |") and lines[3].endswith("| ● |")
    assert lines[-1].startswith("| Hydra of 3 | 2.80 | 1.70 |") and lines[-1].endswith(
        "| 76.70 | -0.1 to +0.1 | 73.60 | 0.264 | 0.1000 | 77.80 | 81.80 | - |"
    )
    assert all(Candidate.from_dict(each.to_dict()) == each for each in ALL)


# Data


def test_the_parts_are_disjoint_whole_and_the_same_for_the_same_seed():
    parts = divided(100, [30, 20], seed=3)
    assert [len(part) for part in parts] == [30, 20, 50] and sorted(torch.cat(parts).tolist()) == list(range(100))
    assert all(map(torch.equal, parts, divided(100, [30, 20], seed=3)))
    assert not torch.equal(parts[0], divided(100, [30, 20], seed=4)[0])


def rows(count, start=0):
    return [{"pixel_values": torch.full((3, 2, 2), float(start + row)), "labels": row % 3} for row in range(count)]


def numbers(data):
    return [int(row["pixel_values"].flatten()[0]) for row in rows_of(data)]


def test_no_held_out_row_is_used_for_two_of_search_calibration_and_evaluation():
    sets = {"near": {"one": rows(11, 1000)}, "far": {"two": rows(7, 2000)}}
    data = held_out(rows(91), sets, 3, batch_size=8, seed=0)
    parts = [numbers(part) for part in (data.search, data.calibration, data.evaluation)]
    assert [len(part) for part in parts] == [30, 30, 31] and sorted(chain(*parts)) == list(range(91))
    foreign = numbers(data.ood_search) + numbers(data.ood["near"]["one"]) + numbers(data.ood["far"]["two"])
    assert sorted(foreign) == [*range(1000, 1011), *range(2000, 2007)] and len(data.ood_search) < 5
    assert all("labels" not in batch for batch in data.ood_search)
    assert (
        "30 rows of data are for the search" in data.notes[0] and "8 for circuits, 10 for evaluation" in data.notes[0]
    )
    again = held_out(rows(91), sets, 3, batch_size=5, seed=0)
    assert again.fingerprints == data.fingerprints and numbers(again.evaluation) == parts[2]
    assert held_out(rows(92), sets, 3, 8, 0).fingerprints["data"] != data.fingerprints["data"]
    assert "detection is not measured" in held_out(rows(91), None, 3, 8, 0).notes[0]


def test_rows_of_batches_of_different_lengths_stay_in_batches_of_one_length():
    texts = [{"input_ids": torch.arange(4 * length).reshape(4, length)} for length in (3, 3, 5, 3)]
    found = select(texts, torch.tensor([0, 3, 4, 5, 6, 9, 15]), batch_size=3)
    assert [tuple(batch["input_ids"].shape) for batch in found] == [(3, 3), (2, 3), (1, 5), (1, 3)]
    assert torch.equal(found[0]["input_ids"][1], texts[0]["input_ids"][3]) and rows_in(found) == 7


@pytest.mark.parametrize(
    ("data", "ood_data", "sentence"),
    [
        (rows(59), None, "data has 59 rows: pass at least 60"),
        ([{"pixel_values": torch.zeros(3, 2, 2)}] * 70, None, "data has no labels"),
        (rows(70), {"near": rows(9), "far": {"x": rows(9)}}, "data sets beside groups"),
        (rows(70), {"near": {}}, "no data sets"),
        (rows(70), {"x": rows(3)}, r"ood_data\['x'\] has 3 rows"),
        ([row | {"labels": 4} for row in rows(70)], None, "has the label 4: the model's classes are 0 to 2"),
        ({"pixel_values": torch.zeros(3)}, None, "data is a dict"),
    ],
)
def test_data_that_nothing_can_be_chosen_by(data, ood_data, sentence):
    with pytest.raises((ValueError, TypeError), match=sentence):
        held_out(data, ood_data, 3, 8, 0)


# Designs


def test_what_is_tried_follows_from_layers_and_heads():
    assert trunk_depths(12) == [9, 6, 3, 0, 11] and trunk_depths(12, equal=6) == [9, 6, 11]
    assert trunk_depths(12, equal=12) == [12] and trunk_depths(2) == [1, 0]
    config = vit_backbone(num_hidden_layers=12).config
    assert budgets_of(config, 0) == [4, 8, 16] and budgets_of(config, 9) == [1, 2, 4]
    assert [in_words(seconds) for seconds in (0.2, 40, 200, 9000)] == ["1 s", "40 s", "3 min", "2.5 h"]
