import math

import pytest
import torch

from hydra_transformers.uncertainty import ood_metrics
from hydra_transformers.uncertainty.paired import accuracy_change, auroc_change, mean_change


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def covered(change, truth):
    return change.low <= truth <= change.high


def test_intervals_of_means_hold_the_truth_about_95_times_of_100():
    common = normal(400, 150)
    own = normal(400, 150, seed=1)
    changes = [mean_change(row, row + 0.3 * noise + 0.1) for row, noise in zip(common, own, strict=True)]
    assert 0.92 < sum(covered(change, 0.1) for change in changes) / 400 < 0.98
    assert all((change.high - change.low) / 2 < 0.1 for change in changes)  # not paired, it would be 0.23


def test_intervals_of_accuracies_hold_the_truth_and_are_never_empty():
    draws = torch.rand(400, 150, generator=torch.Generator().manual_seed(0))
    changes = [accuracy_change((row < 0.8).double(), ((row < 0.7) | (row > 0.97)).double()) for row in draws]
    assert 0.92 < sum(covered(change, -0.07) for change in changes) / 400 < 0.99
    right = torch.ones(150)
    assert accuracy_change(right, right).low < -0.01


def test_the_change_of_an_auroc_is_that_of_the_two_aurocs():
    before = normal(80)
    after = normal(80, seed=1)
    sets = [(normal(50, seed=2) + 1, normal(50, seed=3) + 0.5), (normal(70, seed=4), normal(70, seed=5).round())]
    aurocs = [[ood_metrics(known, each[i])["auroc"] for each in sets] for i, known in enumerate((before, after))]
    assert auroc_change(before, after, sets).difference == pytest.approx(sum(aurocs[1]) / 2 - sum(aurocs[0]) / 2)


def test_intervals_of_aurocs_are_as_wide_as_those_of_a_bootstrap():
    known = normal(300)
    foreign = normal(200, seed=1) + 1
    known_after = known + 0.5 * normal(300, seed=2)
    foreign_after = foreign + 0.5 * normal(200, seed=3)
    change = auroc_change(known, known_after, [(foreign, foreign_after)])
    generator = torch.Generator().manual_seed(0)
    drawn = []
    for _ in range(400):
        i = torch.randint(300, (300,), generator=generator)
        j = torch.randint(200, (200,), generator=generator)
        after = ood_metrics(known_after[i], foreign_after[j])["auroc"]
        drawn.append(after - ood_metrics(known[i], foreign[j])["auroc"])
    assert (change.high - change.low) / 2 == pytest.approx(1.96 * float(torch.tensor(drawn).std()), rel=0.15)


def test_one_row_says_nothing():
    change = mean_change(torch.tensor([1.0]), torch.tensor([2.0]))
    assert (change.difference, change.low, change.high) == (1.0, -math.inf, math.inf)
