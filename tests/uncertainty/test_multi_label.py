"""The mathematics of multi-label classification, against scikit-learn and brute force."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from sklearn import metrics as sklearn_metrics

from hydra_transformers.uncertainty.multi_label import (
    best_thresholds,
    label_sets,
    log_odds,
    lowered_cuts,
    missed_shares,
    multi_label_metrics,
    sets_sentence,
    summarize_labels,
)
from hydra_transformers.uncertainty.temperature import best_temperature


def random_answers(rows=200, members=3, labels=5, seed=0, ties=True):
    """Logits that know something of random labels; ties, and rows without labels."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(rows, labels, generator=generator) < torch.linspace(0.05, 0.5, labels)
    noise = torch.randn(rows, members, labels, generator=generator)
    logits = 1.5 * truth.unsqueeze(1) - 1 + noise
    if ties:
        logits[rows // 2 :] = logits[: rows - rows // 2].clone()
    return logits.double(), truth


def test_the_answer_is_the_mean_of_the_sigmoids():
    logits, _ = random_answers()
    torch.testing.assert_close(log_odds(logits).sigmoid(), logits.sigmoid().mean(dim=1), rtol=0, atol=1e-12)


def test_metrics_are_those_of_scikit_learn():
    logits, truth = random_answers()
    found = multi_label_metrics(logits, truth)
    probabilities = logits.sigmoid().mean(dim=1).numpy()
    decisions = (log_odds(logits) >= 0).numpy()
    expected = {
        "map": sklearn_metrics.average_precision_score(truth, probabilities, average="macro"),
        "f1_micro": sklearn_metrics.f1_score(truth, decisions, average="micro"),
        "f1_macro": sklearn_metrics.f1_score(truth, decisions, average="macro"),
        "accuracy": 1 - sklearn_metrics.hamming_loss(truth, decisions),
        "exact_match": sklearn_metrics.accuracy_score(truth, decisions),
        "nll": np.mean([sklearn_metrics.log_loss(t, p) for t, p in zip(truth.T, probabilities.T, strict=True)]),
        "brier": np.mean((probabilities - truth.numpy()) ** 2),
    }
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-12), name


def test_the_calibration_error_compares_frequency_and_probability_bin_by_bin():
    logits, truth = random_answers()
    probabilities = logits.sigmoid().mean(dim=1)
    expected = []
    for p, y in zip(probabilities.T, truth.T, strict=True):
        bins = [(p >= low) & (p < high) for low, high in pairwise(np.linspace(0, 1, 16))]
        expected.append(sum(abs(float((y[each].double() - p[each]).sum())) for each in bins) / len(p))
    assert multi_label_metrics(logits, truth)["ece"] == pytest.approx(np.mean(expected), abs=1e-12)


def test_a_label_that_no_row_has_is_left_out_of_the_means():
    logits, truth = random_answers(labels=3)
    without = multi_label_metrics(logits, truth)
    absent = torch.zeros(len(truth), 1, dtype=torch.bool)
    with_absent = multi_label_metrics(
        torch.cat([logits, torch.full_like(logits[..., :1], 2.0)], dim=-1), torch.cat([truth, absent], dim=-1)
    )
    assert with_absent["map"] == without["map"] and with_absent["f1_macro"] == without["f1_macro"]
    assert with_absent["f1_micro"] < without["f1_micro"]  # its false alarms count there
    assert math.isnan(multi_label_metrics(logits, torch.zeros_like(truth))["map"])


def test_the_thresholds_have_the_best_f1_of_all():
    logits, truth = random_answers()
    answer = log_odds(logits)
    thresholds = best_thresholds(answer, truth)
    for label in range(truth.shape[1]):
        only = slice(label, label + 1)
        found = summarize_labels(answer[:, only], truth[:, only], answer[:, only] >= thresholds[only].logit())[
            "f1_macro"
        ]
        precision, recall, _ = sklearn_metrics.precision_recall_curve(truth[:, label], answer[:, label])
        best = (2 * precision * recall / (precision + recall).clip(min=1e-9)).max()
        assert found == pytest.approx(best, abs=1e-12)
    assert best_thresholds(answer, torch.zeros_like(truth)).tolist() == [0.5] * 5


def brute_force_log_odds(answer, truth, alpha):
    """The highest common threshold among all that tell sets apart, tried one by one."""
    rows = len(truth)
    tried = [-math.inf, *answer.flatten().unique().tolist(), math.inf]
    holds = [
        each
        for each in tried
        if rows / (rows + 1) * float(missed_shares(answer >= each, truth).mean()) + 1 / (rows + 1) <= alpha + 1e-12
    ]
    return max(holds) if holds else -math.inf


def fitted_sets(logits, truth, alpha, cuts=None, new=None):
    """The sets of new rows, or of the fitting rows."""
    cuts = torch.zeros(truth.shape[1], dtype=torch.float64) if cuts is None else cuts
    lowest = lowered_cuts(log_odds(logits), truth, alpha, cuts)
    return label_sets(log_odds(logits if new is None else new), lowest)


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.37, 0.9])
def test_sets_are_the_smallest_that_keep_the_bound(alpha):
    for seed in range(3):
        logits, truth = random_answers(rows=60, seed=seed)
        answer = log_odds(logits)
        lowest = min(0.0, brute_force_log_odds(answer, truth, alpha))  # predicted labels are always in the set
        assert torch.equal(fitted_sets(logits, truth, alpha), answer >= lowest - 1e-9)


def test_a_threshold_per_label_moves_the_sets_of_that_label():
    logits, truth = random_answers()
    cuts = torch.tensor([0.05, 0.1, 0.2, 0.4, 0.5], dtype=torch.float64).logit()
    shifts = cuts - lowered_cuts(log_odds(logits), truth, 0.1, cuts)
    torch.testing.assert_close(shifts, shifts[:1].expand(5))
    moved = logits - cuts  # of one member, thresholds are a shift of its log-odds
    assert torch.equal(fitted_sets(logits[:, :1], truth, 0.1, cuts), fitted_sets(moved[:, :1], truth, 0.1))


def test_a_label_that_reaches_its_own_threshold_is_in_the_set_whatever_may_be_missed():
    logits, truth = random_answers()
    assert torch.equal(fitted_sets(logits, truth, 0.9), log_odds(logits) >= -1e-9)


def test_the_promised_share_of_missed_labels_holds_on_average_over_calibration_sets():
    alpha = 0.1
    found = []
    for seed in range(150):
        logits, truth = random_answers(rows=300, members=1, labels=4, seed=seed, ties=False)
        sets = fitted_sets(logits[:40], truth[:40], alpha, new=logits[40:])
        found.append(float(missed_shares(sets, truth[40:]).mean()))
    error = np.std(found) / math.sqrt(len(found))
    assert np.mean(found) <= alpha + 3 * error
    assert np.mean(found) >= alpha - 1 / 41 - 3 * error  # and it is not met by sets of all labels


def test_too_few_rows_put_every_label_into_every_set():
    sets = fitted_sets(*random_answers(rows=8), 0.1)
    assert sets.all()
    assert "takes at least 9 calibration rows, there are 8: every set holds every" in sets_sentence(0.1, sets, True)


def test_few_rows_say_how_many_labels_a_single_calibration_may_miss():
    few = sets_sentence(0.1, torch.ones(100, 3, dtype=torch.bool), False)
    assert few.endswith("100 rows are few: the sets of a single calibration may miss up to 15.2 %; pass 500 or more.")
    assert "few" not in sets_sentence(0.1, torch.ones(500, 3, dtype=torch.bool), False)
    found = []
    for seed in range(200):  # rows of one label miss all of theirs, or none: nothing scatters more
        logits = torch.randn(2100, 1, 1, generator=torch.Generator().manual_seed(seed))
        truth = torch.ones(2100, 1, dtype=torch.bool)
        sets = fitted_sets(logits[:100], truth[:100], 0.1, new=logits[100:])
        found.append(float(missed_shares(sets, truth[100:]).mean()))
    assert np.mean(np.array(found) > 0.152) <= 0.1


def test_a_temperature_is_fitted_on_every_label_as_a_choice_of_two():
    logits, truth = random_answers(ties=False)
    found = best_temperature(logits, truth)

    def nll(temperature):
        return multi_label_metrics(logits / temperature, truth)["nll"]

    assert nll(found) <= min(nll(found * 1.01), nll(found / 1.01))
