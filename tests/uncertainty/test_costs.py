"""A threshold of the least expected cost, with a bound on the cost."""

import math

import numpy as np
import pytest
import torch

from experiments.costs import CASES, World, summarize
from hydra_transformers.uncertainty import Detector, Monitor, calibrate
from hydra_transformers.uncertainty.costs import (
    CostTarget,
    PricedRows,
    cheapest_threshold,
    estimate_mean,
    fit_costs,
    highest_mean,
)
from tests.uncertainty.test_tasks import batch_of, data_of, hydra_of


NAME = "single_label_classification"
PRICES = {"cost": {"wrong": 20, "review": 1}}


def test_the_threshold_has_the_least_cost_of_all():
    random = np.random.default_rng(0)
    for case in range(30):
        scores = torch.tensor(random.integers(0, 12, 40) / 12)
        costs = torch.tensor(random.random(40) < scores.numpy()) * 3.0
        found = cheapest_threshold(scores, costs, 1.0)
        totals = {at: float(torch.where(scores <= at, costs, 1.0).sum()) for at in (-math.inf, *scores.tolist())}
        assert torch.where(scores <= found, costs, 1.0).sum() == min(totals.values()), case
    assert cheapest_threshold(scores, torch.full_like(scores, 2.0), 1.0) == -math.inf
    assert cheapest_threshold(scores, torch.zeros_like(scores), 1.0) >= scores.max()


def test_the_bound_on_a_mean_holds_for_any_distribution():
    random = np.random.default_rng(0)
    for values, chances in (((0, 1, 20), (0.7, 0.27, 0.03)), ((0, 20), (0.99, 0.01)), ((0, 5, 20), (0.2, 0.6, 0.2))):
        drawn = random.choice(values, (2000, 200), p=chances)
        true = np.dot(values, chances)
        bounds = {mean: highest_mean(mean, 200, 20, 0.1) for mean in np.unique(drawn.mean(axis=1))}
        broken = np.mean([bounds[mean] < true for mean in drawn.mean(axis=1)])
        assert broken <= 0.1
        estimate = estimate_mean(torch.tensor(drawn[0]).double(), 20, 0.9)
        assert 0 <= estimate.low <= estimate.mean <= estimate.high <= 20


@pytest.mark.parametrize(
    ("target", "sentence"),
    [
        ({"cost": 3}, "pass {'cost': {'wrong': 20, 'review': 1}}"),
        ({"cost": {"wrong": 3}}, "pass {'cost': {'wrong': 20, 'review': 1}}"),
        ({**PRICES, "risk": 0.1}, "pass {'cost': {'wrong': 20, 'review': 1}}"),
        ({"cost": {"wrong": -3, "review": 1}}, "wrong is -3: pass a price"),
        ({"cost": {"wrong": 3, "review": math.inf}}, "review is inf: pass a price"),
        (
            {"cost": {"matrix": [[0, 1], [2, 0]], "review": 1}},
            r"rows of \[2, 2\] prices: pass a row for each of 3 labels",
        ),
    ],
    ids=str,
)
def test_prices_are_checked(target, sentence):
    with pytest.raises(ValueError, match=sentence):
        CostTarget.of(target, 3)


def test_a_matrix_prices_each_answer_by_its_label():
    target = CostTarget.of({"cost": {"matrix": [[0, 5], [9, 0]], "review": 1}}, 2)
    found = target.of_answers(torch.tensor([0, 1, 0, 1]), torch.tensor([0, 0, 1, 1]))
    assert found.tolist() == [0, 5, 9, 0] and target.highest == 9
    same = CostTarget.of({"cost": {"matrix": [[0, 7], [7, 0]], "review": 1}}, 2)
    by_wrong = CostTarget(1.0, wrong=7.0)
    predictions, labels = torch.randint(2, (2, 50))
    assert torch.equal(same.of_answers(predictions, labels), by_wrong.of_answers(predictions, labels))


def test_a_calibrated_model_abstains_by_cost(tmp_path):
    rows = data_of(NAME, 600)
    calibration = calibrate(hydra_of(NAME), rows, target={"cost": {"wrong": 2.5, "review": 1}}, alpha=None)
    hydra = calibration.model.eval()
    abstention = calibration.abstention
    with torch.no_grad():
        output = hydra(**batch_of(NAME))
    assert torch.equal(output.abstain, output.detector_score > abstention.threshold)
    second = torch.randperm(600, generator=torch.Generator().manual_seed(0))[300:].tolist()
    with torch.no_grad():
        output = hydra(
            **{key: torch.stack([rows[place][key] for place in second]) for key in ("input_ids", "attention_mask")}
        )
    wrong = output.logits.argmax(-1) != torch.stack([rows[place]["labels"] for place in second])
    expected = torch.where(output.abstain, 1.0, 2.5 * wrong.double())
    assert abstention.cost.mean == pytest.approx(float(expected.mean()))
    assert abstention.cost_without.mean == pytest.approx(2.5 * float(wrong.double().mean()))
    assert abstention.cost_at_best.mean == pytest.approx(float(wrong.double().mean()))
    assert abstention.cost.mean < abstention.value and "With 90 % confidence a row costs at most" in str(calibration)
    assert "if all are answered" in str(calibration)
    hydra.save_pretrained(tmp_path)
    loaded = type(hydra).from_pretrained(tmp_path)
    assert loaded.decision.settings.threshold == abstention.threshold
    assert "answered" in Monitor.of(loaded).promises
    unsure = calibrate(hydra_of(NAME), rows, target=PRICES, alpha=None, confidence=0).abstention
    assert "No guarantee" in unsure.sentence and unsure.value == unsure.cost.mean


def test_where_every_review_is_cheaper_nothing_is_answered():
    target = {"cost": {"wrong": 1000, "review": 0.01}}
    hydra = calibrate(hydra_of(NAME), data_of(NAME, 200), target=target, alpha=None).model.eval()
    with torch.no_grad():
        output = hydra(**batch_of(NAME))
    scores = output.detector_score
    assert (
        torch.equal(output.abstain, ~(scores <= hydra.decision.settings.threshold))
        and output.abstain.double().mean() > 0.9
    )


@pytest.mark.parametrize("detector", ["knn", "mahalanobis", "relative_mahalanobis"])
def test_a_detector_that_is_fitted_here_does_not_choose_the_threshold_on_its_own_rows(detector):
    rows = data_of(NAME, 120)
    target = {"cost": {"wrong": 1.2, "review": 1}}
    if detector == "knn":
        detector = Detector("knn", k=1)  # each row is its own nearest one
    calibration = calibrate(hydra_of(NAME), rows, target=target, alpha=None, detector=detector)
    with torch.no_grad():
        output = calibration.model.eval()(**batch_of(NAME))
    assert output.abstain.double().mean() < 0.5
    assert calibration.abstention.cost.mean < 0.8  # a review costs 1
    assert "was fitted on 30 of these rows, and the threshold was chosen on the other 30" in str(calibration)


@pytest.mark.parametrize("name", ["multi_label_classification", "reward"])
def test_other_tasks_whose_rows_are_right_as_a_whole_have_prices_too(name, tmp_path):
    rows = data_of(name, 400)
    target = {"cost": {"wrong": 1.8, "review": 1}}
    calibration = calibrate(hydra_of(name), rows, target=target, alpha=None)
    hydra = calibration.model.eval()
    abstention = calibration.abstention
    second = torch.randperm(400, generator=torch.Generator().manual_seed(0))[200:].tolist()
    with torch.no_grad():
        output = hydra(
            **{key: torch.stack([rows[place][key] for place in second]) for key in ("input_ids", "attention_mask")}
        )
    labels = torch.stack([rows[place]["labels"] for place in second])
    if name == "reward":
        wrong = labels.flatten() == 0
    else:
        chosen = output.logits >= torch.tensor(hydra.decision.settings.log_odds)
        wrong = (chosen != labels.bool()).any(dim=1)
    assert torch.equal(output.abstain, ~(output.detector_score <= abstention.threshold))
    expected = torch.where(output.abstain, 1.0, 1.8 * wrong.double())
    assert abstention.cost.mean == pytest.approx(float(expected.mean()))
    assert abstention.cost.mean < abstention.cost_without.mean and output.abstain.any() and not output.abstain.all()
    assert "a row costs at most" in str(calibration) and "answered" in Monitor.of(hydra).promises


@pytest.mark.parametrize("name", ["regression", "token_classification"])
def test_what_is_not_right_or_wrong_as_a_whole_has_no_price(name):
    with pytest.raises(ValueError, match="a cost is for rows that are right or wrong as a whole, this is"):
        calibrate(hydra_of(name), data_of(name), target=PRICES)
    matrix = {"cost": {"matrix": [[0, 1], [2, 0]], "review": 1}}
    with pytest.raises(ValueError, match="a matrix is for single-label classification, this is rewards"):
        calibrate(hydra_of("reward"), data_of("reward"), target=matrix)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_bound_on_the_cost_holds_as_often_as_it_says(case):
    found = summarize(case, draws=100)
    assert found["broken"] <= 0.17 and found["least"] <= found["cost"] <= found["bound"]
    assert found["cost"] <= 1.2 * found["least"] or case.rows == 60, found


def test_the_true_cost_is_that_of_the_made_up_rows():
    world = World(CASES[3])
    target = CostTarget(1.0, wrong=20.0)
    drawn = [world.draw(np.random.default_rng(seed), target) for seed in range(100)]
    rows = PricedRows(*(torch.cat(parts) for parts in zip(*drawn, strict=True)))
    fitted = fit_costs(target, None, rows, rows)
    assert fitted.cost.mean == pytest.approx(world.cost(fitted.threshold), rel=0.02)
