"""Who is pruned: what head sets have in common, beside what chance gives."""

import math
import random
from itertools import combinations
from xml.etree import ElementTree

import pytest

from experiments.heads import compare_head_sets, head_plots, random_order
from hydra_transformers.pruning import Circuit, HeadMap, head_divergence, layer_divergence, overlap
from hydra_transformers.pruning.heads import as_heads_to_prune
from tests.pruning.backbones import clip, vit


HEADS = [(layer, head) for layer in range(3) for head in range(3)]


def test_chance_levels_are_means_over_all_pairs_of_sets():
    a, b = HEADS[:3], HEADS[2:6]
    [pair] = compare_head_sets(vit(), {"a": a, "b": b}).pairs.values()
    prune = as_heads_to_prune
    others = list(combinations(HEADS, 4))  # against one fixed set: all are alike by symmetry
    assert pair.common == 1 and pair.sizes == (3, 4)
    assert pair.common_by_chance == pytest.approx(mean(len(set(a) & set(each)) for each in others))
    assert pair.overlap_by_chance == pytest.approx(mean(overlap(prune(a), prune(each)) for each in others))
    assert pair.head_divergence_by_chance == pytest.approx(
        mean(head_divergence(prune(a), prune(each)) for each in others)
    )
    assert pair.p_value == pytest.approx(mean(len(set(a) & set(each)) >= 1 for each in others))
    every = [layer_divergence(prune(x), prune(y)) for x in combinations(HEADS, 3) for y in combinations(HEADS, 4)]
    assert pair.layer_divergence_by_chance == pytest.approx(mean(every), abs=0.02)  # from random draws


def test_chance_in_these_layers_knows_how_many_heads_of_a_layer_each_set_has():
    a, b = [(0, 0), (0, 1), (1, 0)], [(0, 1), (0, 2), (2, 0)]
    [pair] = compare_head_sets(vit(), {"a": a, "b": b}).pairs.values()
    assert pair.within_layers == pytest.approx(2 * 2 / 3)
    drawn = random.Random(0)
    common = mean(len(set(drawn.sample(range(3), 2)) & set(drawn.sample(range(3), 2))) for _ in range(4000))
    assert pair.within_layers == pytest.approx(common, abs=0.05)


def mean(values) -> float:
    values = list(values)
    return sum(values) / len(values)


def test_the_divergence_of_heads_says_the_same_as_their_overlap():
    a, b = {0: [0, 1], 2: [2, 1]}, {0: [0], 2: [2, 0], 1: [1]}
    assert head_divergence(a, b) == pytest.approx((1 - 2 / 4) * math.log(2))
    assert head_divergence(a, a) == 0 and head_divergence({0: [0]}, {0: [1]}) == pytest.approx(math.log(2))


def test_tables_maps_and_pictures_have_every_set(tmp_path):
    circuit = Circuit([(0, 1), (2, 0)], [0.5, 0.4], 0.6, "acc")
    found = compare_head_sets(vit(), {"one": circuit, "other": {2: [0, 1]}, "a|b": [(1, 1)]})
    text = found.to_markdown()
    assert "| one | 2 | 1 | 0 | 1 |" in text and "| one | other | 2, 2 | 1 (0.4) |" in text
    assert r"| a\|b | 1 |" in text  # one cell
    assert [path.name for path in found.plot(tmp_path)] == ["kept_heads.png", "overlaps.png"]
    assert found._repr_html_().count("<svg") == 3 and found._repr_html_().count("<rect") == 27
    assert len(found.to_dict()["pairs"]) == 3


def test_towers_have_a_map_each(tmp_path, monkeypatch):
    titles, draw = [], head_plots._maps
    monkeypatch.setattr(
        head_plots, "_maps", lambda maps, **options: titles.append(list(maps)) or draw(maps, **options)
    )
    found = compare_head_sets(clip(), {"one": {"vision": {0: [1]}, "text": {1: [0, 1]}}})
    assert [path.name for path in found.plot(tmp_path)] == ["kept_heads_vision.png", "kept_heads_text.png"]
    assert titles == [["one: 3 kept"], ["one: 2 kept"]]  # of the four of each tower
    assert "text tower" in found._repr_html_()


def test_a_random_order_has_every_head_once_and_a_seed():
    model = vit()
    assert sorted(random_order(model, 0)) == HEADS and random_order(model, 0) == random_order(model, 0)
    assert random_order(model, 0) != random_order(model, 1)
    assert len(random_order(clip(), 0, towers=["text"])) == 4


def test_a_circuit_shows_itself_in_a_notebook():
    made_from = {"kept_heads": [[[0, 1, 2]], [[0, 2]]]}
    circuit = Circuit([(1, 2), (0, 0)], [0.75, 0.5], 0.7, "avg", made_from=made_from)
    page = circuit._repr_html_()
    assert page.count("<rect") == 5  # head (1, 1) was not there
    assert "avg: order of 2 removals" in page and "0.700 with all heads, 0.750 without the first 1" in page
    assert circuit.head_map().maps["avg: order of 2 removals"] == {
        (0, 0): 2,
        (0, 1): 3,
        (0, 2): 3,
        (1, 0): 3,
        (1, 2): 1,
    }
    assert Circuit([(1, 2)], [0.7], 0.7, "acc")._repr_html_().count("<rect") == 1  # of a circuit that knows no model


def test_the_darkest_cell_is_the_highest_and_names_are_not_taken_for_tags():
    page = HeadMap({"<b>": {(0, 0): 0.0, (0, 1): 2.0}})._repr_html_()
    assert ElementTree.fromstring(page).tag == "div"
    assert "&lt;b&gt;" in page and 'fill="#EFF3F8"' in page and 'fill="#005AA0"' in page


def test_what_is_wrong_is_said_in_a_sentence():
    with pytest.raises(ValueError, match=r"head_sets\['none'\] names no head"):
        compare_head_sets(vit(), {"none": {}})
    with pytest.raises(TypeError, match="pass a Circuit, heads to prune, or a list of heads"):
        compare_head_sets(vit(), {"what": 3})
    with pytest.raises(TypeError, match="which is no head"):
        compare_head_sets(vit(), {"what": [3]})
