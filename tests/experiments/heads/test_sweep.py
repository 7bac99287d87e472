"""How many heads can go: every point is that of the pruned network, and orders come in many forms."""

import pytest
import torch

from experiments.heads import BudgetSweep, HeadScores, random_order, sweep_budgets
from experiments.heads.sweep import SweepPoint
from hydra_transformers.pruning import Circuit, prune_heads, taylor_prune, taylor_scores
from hydra_transformers.pruning.heads import as_heads_to_prune
from hydra_transformers.reports import evaluate_uncertainty
from tests.pruning.backbones import family


@pytest.fixture(scope="module")
def tiny():
    return family("vit", torch.float32)


@pytest.fixture(scope="module")
def found(tiny):
    model, id_data, ood_data, _ = tiny
    circuit = Circuit([(1, 0), (2, 2), (0, 1)], [0.5] * 3, 0.5, "avg")
    orders = {
        "circuit": circuit,
        "Taylor": taylor_scores(model, id_data),
        "by layer": lambda budget: taylor_prune(model, id_data, heads_per_layer=3 - budget // 3),
        "random": [random_order(model, seed) for seed in range(2)],
    }
    return sweep_budgets(model, id_data, {"other": ood_data}, orders=orders, budgets=[6, 3])


@pytest.mark.slow
def test_a_point_is_what_the_pruned_network_reaches(tiny, found):
    model, id_data, ood_data, _ = tiny
    pruned = prune_heads(model, {1: [0], 2: [2], 0: [1]})
    [expected] = evaluate_uncertainty(pruned, id_data, {"far": {"other": ood_data}}).models.values()
    [point] = [each for each in found.points if each.order == "circuit"]
    assert (point.budget, point.kept, point.tuned, point.time) == (3, 6, False, None)
    assert (point.accuracy, point.ece, point.nll) == tuple(
        expected["data"][name] for name in ("accuracy", "ece", "nll")
    )
    assert point.auroc == point.aurocs["other"] == expected["other (far)"]["auroc"]
    [dense] = evaluate_uncertainty(model, id_data).models.values()
    assert (found.dense.budget, found.dense.kept) == (0, 9) and found.dense.nll == pytest.approx(dense["data"]["nll"])


def test_an_order_is_left_out_where_it_ranks_too_few_and_draws_stand_side_by_side(found):
    assert found.orders == ["circuit", "Taylor", "by layer", "random"] and found.budgets == [3, 6]
    assert list(found.values("circuit", "nll")) == [3]
    assert [len(draws) for draws in found.values("random", "nll").values()] == [2, 2]
    table = found.to_markdown()
    assert "### AUROC (%)" in table and "| Of 9 heads go | 0 | 3 | 6 |" in table and " to " in table
    assert "### Time" not in table


def test_scores_take_the_lowest_heads_first(tiny, found):
    model, id_data, _, _ = tiny
    scores = taylor_scores(model, id_data)
    lowest = sorted(scores, key=scores.__getitem__)[:3]
    [expected] = evaluate_uncertainty(prune_heads(model, as_heads_to_prune(lowest)), id_data).models.values()
    assert found.values("Taylor", "nll")[3] == [expected["data"]["nll"]]


@pytest.mark.slow
def test_fine_tuned_networks_are_judged_beside_the_pruned_ones(tiny, tmp_path):
    model, id_data, _, _ = tiny
    names = []

    def finetune(pruned, name):
        names.append(name)
        with torch.no_grad():
            for parameter in pruned.classifier.parameters():
                parameter.zero_()
        return pruned

    order = [(0, 0), (1, 1)]
    found = sweep_budgets(model, id_data, orders={"by hand!": order}, budgets=[2], finetune=finetune, seconds=0.01)
    assert names == ["by-hand-0-2"] and found.stages == [False, True]
    before, after = found.points
    assert (before.tuned, after.tuned) == (False, True) and after.nll == pytest.approx(torch.tensor(5.0).log().item())
    assert found.dense.auroc is None and found.metrics == ["accuracy", "ece", "nll", "time"]
    assert before.time > 0 and after.time is None
    assert "| by hand!, fine-tuned |" in found.to_markdown()
    [path] = found.plot(tmp_path)
    assert path.name == "budgets.png"


def test_clip_is_swept_as_a_zero_shot_classifier():
    model, id_data, ood_data, prompts = family("clip", torch.float32)
    order = [("text", 0, 1), ("vision", 1, 0)]
    found = sweep_budgets(model, id_data, ood_data, orders={"order": order}, budgets=[2], class_prompts=prompts)
    [expected] = evaluate_uncertainty(
        prune_heads(model, as_heads_to_prune(order)), id_data, class_prompts=prompts
    ).models.values()
    assert found.points[0].accuracy == expected["data"]["accuracy"] and found.points[0].nll == expected["data"]["nll"]
    with pytest.raises(ValueError, match="class_prompts has no input_ids"):
        sweep_budgets(model, id_data, orders={"order": order}, budgets=[2])


def point(budget: int, accuracy: float, ece: float = 0.1) -> SweepPoint:
    return SweepPoint("order", 0, budget, 9 - budget, False, accuracy, ece, 1.0, None, None, {})


def test_the_largest_budget_is_the_last_before_the_metric_is_first_too_low():
    points = [point(2, 0.9), point(4, 0.85, 0.3), point(6, 0.89)]
    found = BudgetSweep(point(0, 0.9), points)
    assert [found.largest_budget("order", tolerance=each) for each in (0.01, 0.06)] == [2, 6]
    assert found.largest_budget("order", "ece", tolerance=0.1) == 2
    assert BudgetSweep(point(0, 0.95), points).largest_budget("order") == 0
    with pytest.raises(ValueError, match="metric is 'auroc'"):
        found.largest_budget("order", "auroc")
    with pytest.raises(ValueError, match="order is 'other'"):
        found.largest_budget("other")
    with pytest.raises(ValueError, match="'order' has no accuracy after fine-tuning: pass tuned=False"):
        found.largest_budget("order", tuned=True)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"budgets": []}, "budgets is empty"),
        ({"budgets": [9]}, "budgets is 9: the model has 9 heads"),
        ({"budgets": [3]}, "no order ranks 3 heads"),
        ({"orders": {"a": {(0, 0): float("nan")}}}, "gives head .* the score nan"),
        ({"orders": {"a": {0: [1]}}}, "a dict whose keys are no heads"),
        ({"orders": {"a": lambda budget: [(0, 0)]}, "budgets": [2]}, r"orders\['a'\]\(2\) gives 1 heads"),
        ({"orders": {}}, "pass {name: order of heads}, at least one"),
        ({"budgets": 2}, "budgets is 2: pass how many heads go"),
        ({"class_prompts": {}}, "class_prompts is for CLIP"),
        ({"finetune": lambda pruned, name: None}, "finetune gave a NoneType"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(tiny, options, sentence):
    model, id_data, _, _ = tiny
    with pytest.raises((TypeError, ValueError), match=sentence):
        sweep_budgets(model, id_data, **({"orders": {"a": [(0, 0)]}, "budgets": [1]} | options))


def test_scores_of_both_towers_stand_side_by_side(tmp_path):
    scores = {
        (tower, layer, head): 2.0 if tower == "vision" else 1.0 + layer
        for tower in ("vision", "text")
        for layer in range(2)
        for head in range(2)
    }
    scores["vision", 2, 0] = 3.0  # a layer that the other tower does not have
    found = HeadScores(scores)
    assert found.ratios() == {0: 2.0, 1: 1.0}
    assert "| Layer | vision | text | vision / text |" in found.to_markdown()
    assert "| 2 | 3 (3 to 3) | - | - |" in found.to_markdown()
    assert [path.name for path in found.plot(tmp_path)] == ["scores.png"]
    assert found._repr_html_().count("<svg") == 2
    alone = HeadScores({(0, 0): 1.0, (0, 1): 3.0})
    assert alone.ratios() == {} and "| 0 | 2 (1 to 3) |" in alone.to_markdown()
    with pytest.raises(TypeError, match=r"pass \{head: score\}"):
        HeadScores({})
    with pytest.raises(TypeError, match="keys that are no heads"):
        HeadScores({(0, 0): 1.0, ("text", 0, 1): 1.0})
