import math

import numpy as np
import pytest
import torch
from scipy.stats import beta, binom

from hydra_transformers.uncertainty import Abstention, ood_metrics
from hydra_transformers.uncertainty.few_rows import highest_share, range_of_share


def validation(rows=500, seed=0, steps=None):
    """Scores in [0, 1) and whether each row is right: the error rate grows from 0 to 0.4; `steps` makes ties."""
    generator = np.random.default_rng(seed)
    scores = generator.random(rows)
    if steps is not None:
        scores = np.floor(scores * steps) / steps
    return scores, generator.random(rows) >= 0.4 * scores**2


def risk_and_coverage(scores, correct, threshold):
    answered = scores <= threshold
    return (~correct[answered]).mean(), answered.mean()


# --- What is met on the fitting rows


@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("risk", [0.02, 0.05, 0.1])
def test_a_risk_is_kept_at_the_largest_coverage(risk, steps):
    scores, correct = validation(steps=steps)
    rule = Abstention.fit(scores, correct, risk=risk)
    holding = [t for t in scores if risk_and_coverage(scores, correct, t)[0] <= risk]
    assert scores[scores <= rule.threshold].max() == max(holding)
    assert (rule.risk, rule.coverage) == pytest.approx(risk_and_coverage(scores, correct, max(holding)))
    assert rule.risk_without == pytest.approx((~correct).mean())
    assert rule.risk <= risk < rule.risk_without


@pytest.mark.parametrize("steps", [None, 7])
@pytest.mark.parametrize("coverage", [0.07, 0.5, 0.9, 0.999])
def test_a_coverage_is_reached_at_the_lowest_threshold(coverage, steps):
    scores, _ = validation(rows=100, steps=steps)
    rule = Abstention.fit(scores, coverage=coverage)
    lowest = min(t for t in scores if (scores <= t).mean() >= coverage)
    assert scores[scores <= rule.threshold].max() == lowest
    assert rule.coverage >= coverage and rule.fpr == pytest.approx(1 - rule.coverage)
    assert rule.risk is None and rule.risk_without is None


def test_a_coverage_counts_rows_as_it_was_written():
    assert Abstention.fit(range(100), coverage=0.07).coverage == 0.07  # 0.07 * 100 is a hair above 7


@pytest.mark.parametrize("steps", [None, 20])
def test_the_fpr_at_95_percent_tpr_is_fpr95(steps):
    known, _ = validation(steps=steps)
    ood = validation(rows=333, seed=1, steps=steps)[0] + 0.4
    rule = Abstention.fit(known, ood_scores=ood, tpr=0.95)
    assert rule.fpr == ood_metrics(known, ood)["fpr95"]
    assert rule.tpr == (ood > rule.threshold).mean() >= 0.95
    higher = min(score for score in ood if score > rule.threshold)
    assert (ood > higher).mean() < 0.95  # no higher threshold does it


def test_rows_of_equal_score_are_all_answered_or_none():
    scores = [0.1, 0.5, 0.5, 0.5, 0.9]
    correct = [1, 1, 1, 0, 0]
    assert Abstention.fit(scores, correct, risk=0.2).coverage == 0.2
    assert Abstention.fit(scores, correct, risk=0.25).coverage == 0.8
    assert Abstention.fit(scores, coverage=0.3).coverage == 0.8
    assert Abstention.fit(scores, ood_scores=[0.5, 0.5, 0.7], tpr=0.5).fpr == 0.8


# --- What is guaranteed


@pytest.mark.parametrize(("share", "confidence"), [(0.9, 0.95), (0.5, 0.9), (0.95, 0.99)])
def test_guaranteed_shares_take_the_least_order_statistic_whose_beta_holds(share, confidence):
    scores, _ = validation(rows=300)
    # The share below the k-th of n sorted scores is Beta(k, n + 1 - k).
    least = next(k for k in range(1, 301) if beta.sf(share, k, 301 - k) >= confidence)
    rule = Abstention.fit(scores, coverage=share, confidence=confidence)
    assert scores[scores <= rule.threshold].max() == np.sort(scores)[least - 1]
    mirrored = Abstention.fit([0.0], ood_scores=scores, tpr=share, confidence=confidence)
    assert scores[scores > mirrored.threshold].min() == np.sort(scores)[300 - least]


def plain_certified(scores, correct, risk, confidence):
    """The walk from its definition: SciPy's tail at every count, from every start, the wrong first among equal scores."""
    order = sorted(range(len(scores)), key=lambda i: (scores[i], correct[i]))
    errors = np.cumsum([not correct[i] for i in order])
    rows = len(scores)
    chance = 1 - confidence
    starts = sorted({math.ceil(rows * share) - 1 for share in (1 / 8, 1 / 4, 1 / 2, 3 / 4)} - {0})
    while starts and (1 - risk) ** starts[0] > chance / len(starts):
        starts.pop(0)
    best = None
    for start in starts or [rows - 1]:
        for count in range(start, rows + 1):
            if count == 0 or binom.cdf(errors[count - 1], count, risk) > chance / max(1, len(starts)):
                break
            is_end = count == rows or scores[order[count]] > scores[order[count - 1]]
            if count > start and is_end:
                best = max(best or -math.inf, scores[order[count - 1]])
    return best


@pytest.mark.parametrize("steps", [None, 12])
@pytest.mark.parametrize("rows", [45, 60, 300, 901])
@pytest.mark.parametrize("risk", [0.05, 0.1, 0.3])
def test_a_guaranteed_risk_is_that_of_the_plain_walk(rows, risk, steps):
    scores, correct = validation(rows=rows, steps=steps, seed=rows)
    expected = plain_certified(scores, correct, risk, 0.9)
    if expected is None:
        with pytest.raises(ValueError, match="cannot be guaranteed"):
            Abstention.fit(scores, correct, risk=risk, confidence=0.9)
    else:
        rule = Abstention.fit(scores, correct, risk=risk, confidence=0.9)
        assert scores[scores <= rule.threshold].max() == expected


def populations():
    """Name -> error rate as a function of the score; the target of the test is 0.1."""
    return {
        "at the target": lambda s: np.full_like(s, 0.1001),  # whatever is answered breaks it
        "rising": lambda s: 0.6 * s**2,
        "falling": lambda s: 0.25 * (1 - s),
        "a hill in the middle": lambda s: np.where((s > 0.45) & (s < 0.55), 0.6, 0.04),
        "just above at the end": lambda s: np.where(s < 0.5, 0.05, 0.1502),
    }


@pytest.mark.slow
@pytest.mark.parametrize("steps", [None, 8])
@pytest.mark.parametrize("name", populations())
def test_a_guaranteed_risk_holds_over_many_fits(name, steps):
    error_rate = populations()[name]
    generator = np.random.default_rng(0)

    def draw(rows):
        scores = generator.random(rows)
        return scores if steps is None else np.floor(scores * steps) / steps

    everyone = np.sort(draw(400_000))
    true_risk = np.cumsum(error_rate(everyone)) / np.arange(1, len(everyone) + 1)
    fits = 200
    broken = 0
    for _ in range(fits):
        scores = draw(250)
        correct = generator.random(250) >= error_rate(scores)
        try:
            rule = Abstention.fit(scores, correct, risk=0.1, confidence=0.8)
        except ValueError:
            continue
        answered = np.searchsorted(everyone, rule.threshold, side="right")
        broken += true_risk[answered - 1] > 0.1
    assert broken <= binom.ppf(0.999, fits, 0.2)  # at most 1 - confidence, and what 200 fits scatter


@pytest.mark.parametrize("target", ["coverage", "tpr"])
def test_guaranteed_shares_hold_over_many_fits(target):
    generator = np.random.default_rng(0)
    fits = 400
    broken = 0
    for _ in range(fits):
        rows = generator.random(200)
        if target == "coverage":
            broken += Abstention.fit(rows, coverage=0.9, confidence=0.8).threshold < 0.9
        else:
            broken += Abstention.fit([0.5], ood_scores=rows, tpr=0.9, confidence=0.8).threshold > 0.1
    assert binom.ppf(0.001, fits, 0.1) <= broken <= binom.ppf(0.999, fits, 0.2)  # held, and not by much too much


# --- The rule itself


def test_rows_above_the_threshold_and_nan_are_not_answered():
    rule = Abstention.fit([0.1, 0.3, 0.7], coverage=0.6)
    assert rule.threshold == 0.5
    scores = torch.tensor([[0.5, 0.50001], [math.nan, -math.inf]], dtype=torch.float64)
    assert rule.abstain(scores).tolist() == [[False, True], [True, False]]
    assert rule.abstain([]).tolist() == []
    assert Abstention.fit([0.1, 0.7], coverage=0.9).abstain(np.array([0.7])).tolist() == [False]
    half = torch.tensor([0.1, 0.3, 0.7], dtype=torch.bfloat16)
    assert Abstention.fit(half, coverage=0.6).abstain(half).tolist() == [False, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("target", [{"risk": 0.1}, {"coverage": 0.8}, {"tpr": 0.7}])
def test_the_threshold_lies_between_two_scores_so_that_rounding_moves_no_row(target, dtype):
    values, correct = validation(rows=200)
    scores = torch.tensor(values, dtype=dtype)
    ood = torch.tensor(values[::2] + 0.1, dtype=dtype)
    rule = Abstention.fit(scores, correct, ood, **target)
    nearest = min((scores - rule.threshold).abs().min(), (ood - rule.threshold).abs().min())
    assert nearest > 100 * torch.finfo(torch.float32).eps
    for rounding in (1 - 1e-6, 1 + 1e-6):
        assert torch.equal(rule.abstain(scores * rounding), rule.abstain(scores))
    # neighbours that no number lies between stay apart
    close = torch.tensor([0.5, float(torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)))])
    assert Abstention.fit(close, coverage=0.5).abstain(close).tolist() == [False, True]
    assert Abstention.fit([0.0], ood_scores=close, tpr=0.5).abstain(close).tolist() == [False, True]


def test_the_sentence_tells_what_it_buys_and_what_it_promises():
    scores, correct = validation(2000)
    plain = Abstention.fit(scores, correct, coverage=0.9)
    assert (
        f"answering 90 % cuts errors from {100 * plain.risk_without:.3g} % to {100 * plain.risk:.3g} %"
        in plain.sentence
    )
    assert "No guarantee" in plain.sentence
    sure = Abstention.fit(scores, correct, risk=0.1, confidence=0.95)
    assert (
        "With 95 % confidence at most 10 % of the answered rows are wrong, if new rows are independent"
        in sure.sentence
    )
    useless = Abstention.fit(-scores, correct, coverage=0.5)
    assert "answering 50 % raises errors from" in useless.sentence
    right = Abstention.fit(scores, [True] * len(scores), coverage=0.5)
    assert "answering 50 % leaves errors at 0 %." in right.sentence
    assert Abstention._effect_on_errors(0.63001, 0.63002) == "leaves errors at 63 %"
    caught = Abstention.fit(scores, ood_scores=scores + 0.5, tpr=0.9, confidence=0.9)
    assert "90 % of the out-of-distribution rows are refused, if new rows" in caught.sentence
    assert all("Nothing holds under distribution shift." in rule.sentence for rule in (plain, sure, useless, caught))


@pytest.mark.parametrize("rows", [30, 499, 500])
def test_few_rows_say_how_far_the_target_may_be_missed(rows):
    scores, correct = validation(rows)
    by_target = [
        Abstention.fit(scores, correct, coverage=0.9),
        Abstention.fit(scores, correct, risk=0.3),
        Abstention.fit(scores, ood_scores=scores, tpr=0.9),
    ]
    for rule in by_target:
        is_few = rows < 500 or (rule.target == "risk" and rule.coverage < 1)
        assert ("few" in rule.sentence) == is_few, rule.sentence
    sure = Abstention.fit(scores, correct, coverage=0.5, confidence=0.9)
    assert "few" not in sure.sentence  # what is promised holds however few they are
    mean_error = Abstention.fit(scores, errors=10 * scores, risk=100.0)
    assert "may be wrong" not in mean_error.sentence


def test_nine_of_ten_calibrations_answer_a_share_in_the_range_that_is_named():
    low, high = range_of_share(27, 30)
    shares = np.sort(np.random.default_rng(0).random((4000, 30)), axis=1)[:, 26]  # scores are uniform
    assert np.mean((low <= shares) & (shares <= high)) == pytest.approx(0.9, abs=0.02)
    assert range_of_share(0, 30)[0] == 0 and range_of_share(31, 30)[1] == 1
    wrong = np.random.default_rng(0).binomial(40, 0.2, size=4000)
    bounds = {count: highest_share(count, 40) for count in range(41)}
    assert np.mean([bounds[count] >= 0.2 for count in wrong]) >= 0.9


def test_the_order_of_the_rows_does_not_matter():
    scores, correct = validation(steps=30)
    order = np.random.default_rng(3).permutation(len(scores))
    for target in ({"risk": 0.05}, {"risk": 0.1, "confidence": 0.9}, {"coverage": 0.8, "confidence": 0.9}):
        assert Abstention.fit(scores, correct, **target) == Abstention.fit(scores[order], correct[order], **target)
