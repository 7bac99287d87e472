import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score, roc_curve

from hydra_transformers.uncertainty import classification_metrics, ood_metrics
from hydra_transformers.uncertainty.metrics import (
    adaptive_calibration_error,
    diversity_metrics,
    error_coverage_curve,
    expected_calibration_error,
)


PROPERTY = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def ensemble(samples=400, members=3, classes=7, seed=0, scale=2.0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (samples,), generator=generator)
    logits = scale * torch.randn(samples, members, classes, generator=generator, dtype=torch.float64)
    logits[torch.arange(samples), :, labels] += 2
    return logits, labels


def doubles(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_accuracy_brier_and_nll_agree_with_scikit_learn():
    logits, labels = ensemble()
    mean = logits.softmax(-1).mean(1).numpy()
    metrics = classification_metrics(logits, labels)
    assert metrics["accuracy"] == (mean.argmax(1) == labels.numpy()).mean()
    assert metrics["nll"] == pytest.approx(log_loss(labels, mean, labels=range(7)), rel=1e-12)
    one_against_rest = [brier_score_loss(labels == c, mean[:, c]) for c in range(7)]
    assert metrics["brier"] == pytest.approx(sum(one_against_rest), rel=1e-12)


@pytest.mark.parametrize("num_bins", [1, 5, 15, 40])
def test_ece_agrees_with_torchmetrics(num_bins):
    from torchmetrics.functional.classification import multiclass_calibration_error

    logits, labels = ensemble()
    mean = logits.softmax(-1).mean(1)
    expected = multiclass_calibration_error(mean, labels, num_classes=7, n_bins=num_bins, norm="l1").item()
    confidence, prediction = mean.double().max(dim=1)
    found = expected_calibration_error(confidence, (prediction == labels).double(), num_bins)
    assert found == pytest.approx(expected, abs=1e-6)  # it counts in float32
    assert num_bins != 15 or classification_metrics(logits, labels)["ece"] == pytest.approx(expected, abs=1e-6)


def test_ece_bins_are_closed_on_the_left_and_the_last_on_both_sides():
    # Bins [0, 0.5) and [0.5, 1]: gaps of the second one cancel, (1 - 0.5) + (0 - 1) + (1 - 0.75) = -0.25.
    error = expected_calibration_error(doubles(0.25, 0.5, 1.0, 0.75), doubles(1, 1, 0, 1), num_bins=2)
    assert error == pytest.approx((0.75 + 0.25) / 4)


def test_adaptive_ece_of_a_worked_example():
    # Sorted: 0.5 0.6 0.7 | 0.8 0.9, with correct 0 1 1 | 1 0: |2 - 1.8| + |1 - 1.7| over 5 samples.
    error = adaptive_calibration_error(doubles(0.9, 0.5, 0.7, 0.8, 0.6), doubles(0, 0, 1, 1, 1), num_bins=2)
    assert error == pytest.approx((0.2 + 0.7) / 5)


def test_adaptive_ece_gives_tied_samples_their_mean_correctness():
    # Two bins of two; all four tie at 0.5 with one right: each bin expects half a right one.
    for correct in ([1, 0, 0, 0], [0, 0, 0, 1]):
        error = adaptive_calibration_error(doubles(0.5, 0.5, 0.5, 0.5), doubles(*correct), num_bins=2)
        assert error == pytest.approx(0.25)


def test_aurc_of_a_worked_example():
    # Most confident first: right, wrong, right, right; risks 0, 1/2, 1/3, 1/4.
    _, risk = error_coverage_curve(doubles(0.6, 0.9, 0.7, 0.8), doubles(0, 0, 0, 1))
    assert risk.tolist() == pytest.approx([0, 1 / 2, 1 / 3, 1 / 4])
    probabilities = torch.tensor([[0.6, 0.4], [0.9, 0.1], [0.7, 0.3], [0.8, 0.2]], dtype=torch.float64)
    with pytest.warns(UserWarning, match="fewer than the 15"):
        metrics = classification_metrics(probabilities.log().unsqueeze(1), [0, 0, 0, 1])
    assert metrics["aurc"] == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 4)


def test_fpr95_takes_the_first_threshold_with_a_recall_of_at_least_95_percent():
    ood = np.arange(20) + 0.5  # 19 of 20 are found at or above 1.5
    assert ood_metrics([0, 1, 2, 30], ood)["fpr95"] == 2 / 4
    assert ood_metrics([0, 1, 1.5, 2], ood)["fpr95"] == 2 / 4  # a tie with the threshold is a false alarm
    assert ood_metrics([0, 1, 2, 3], [0.5, 9.0])["fpr95"] == 3 / 4  # one of two is not 95 %: both are needed


@pytest.mark.parametrize("ties", [False, True])
def test_ood_metrics_agree_with_scikit_learn(ties):
    generator = np.random.default_rng(0)
    id_scores = generator.normal(0, 1, 700)
    ood_scores = generator.normal(1, 1.5, 300)
    if ties:
        id_scores = id_scores.round()
        ood_scores = ood_scores.round()
    truth = np.r_[np.zeros(700), np.ones(300)]
    scores = np.r_[id_scores, ood_scores]
    fpr, tpr, _ = roc_curve(truth, scores, drop_intermediate=False)
    metrics = ood_metrics(id_scores, ood_scores)
    assert metrics["auroc"] == pytest.approx(roc_auc_score(truth, scores), rel=1e-12)
    assert metrics["aupr"] == pytest.approx(average_precision_score(truth, scores), rel=1e-12)
    assert metrics["fpr95"] == pytest.approx(fpr[np.argmax(tpr >= 0.95)], rel=1e-12)


def test_scores_that_say_nothing_are_worth_a_coin_toss():
    assert ood_metrics([1.0] * 30, [1.0] * 10) == {"auroc": 0.5, "aupr": 0.25, "fpr95": 1.0}


def test_diversity_metrics_of_a_worked_example():
    together = [[0.0, -torch.inf]] * 2
    apart = [[0.0, -torch.inf], [-torch.inf, 0.0]]
    metrics = diversity_metrics([together, apart])
    assert metrics == pytest.approx({"mutual_information": math.log(2) / 2, "disagreement": 0.5})
    assert diversity_metrics(torch.randn(5, 1, 3)) == {"mutual_information": 0, "disagreement": 0}


def test_the_nll_of_a_tiny_probability_is_finite_and_of_a_zero_one_infinite_with_a_warning():
    logits = torch.zeros(20, 2, 3, dtype=torch.float16)
    logits[:, :, 0] = 60000
    labels = [1] * 20
    assert classification_metrics(logits, labels)["nll"] == pytest.approx(60000, rel=1e-3)
    logits[:, :, 1] = -torch.inf
    with pytest.warns(UserWarning, match="nll is infinite"):
        metrics = classification_metrics(logits, labels)
    assert metrics["nll"] == math.inf and not any(math.isnan(value) for value in metrics.values())


def test_fewer_samples_than_bins_give_defined_values_and_a_warning():
    with pytest.warns(UserWarning, match="2 samples are fewer than the 15 calibration bins"):
        metrics = classification_metrics(torch.zeros(2, 1, 2), [0, 1])
    assert metrics["aece"] == pytest.approx(0) and metrics["ece"] == pytest.approx(0)


@PROPERTY
@given(
    st.integers(1, 40), st.integers(1, 3), st.integers(2, 4), st.integers(0, 10**6), st.sampled_from([0.0, 1.0, 50.0])
)
def test_metrics_are_bounded_and_the_order_of_samples_leaves_no_trace(samples, members, classes, seed, scale):
    generator = torch.Generator().manual_seed(seed)
    # Rounded logits make ties, scale 0 makes nothing else.
    logits = (scale * torch.randn(samples, members, classes, generator=generator)).round()
    labels = torch.randint(classes, (samples,), generator=generator)
    order = torch.randperm(samples, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = classification_metrics(logits, labels)
        assert classification_metrics(logits[order], labels[order]) == metrics
    assert all(0 <= metrics[name] <= 1 for name in ("accuracy", "ece", "aece", "aurc"))
    assert 0 <= metrics["brier"] <= 2 and 0 <= metrics["nll"] < math.inf


scores = hnp.arrays(np.float64, st.integers(1, 30), elements=st.floats(-3, 3, width=16))


@PROPERTY
@given(scores, scores)
def test_detection_is_symmetric_monotone_and_bounded(id_scores, ood_scores):
    metrics = ood_metrics(id_scores, ood_scores)
    assert all(0 <= value <= 1 for value in metrics.values())
    assert ood_metrics(ood_scores, id_scores)["auroc"] == pytest.approx(1 - metrics["auroc"])
    assert ood_metrics(id_scores[::-1].copy(), ood_scores[::-1].copy()) == metrics
    assert ood_metrics(8 * id_scores, 8 * ood_scores) == metrics
    truth = np.r_[np.zeros(len(id_scores)), np.ones(len(ood_scores))]
    assert metrics["auroc"] == pytest.approx(roc_auc_score(truth, np.r_[id_scores, ood_scores]))
