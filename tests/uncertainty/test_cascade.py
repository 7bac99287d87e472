"""Thresholds of several stages with one promise for all final answers."""

import itertools
import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from experiments.cascades import CASES, World, summarize
from hydra_transformers.uncertainty.calibration import halves_of
from hydra_transformers.uncertainty.cascade import (
    Counts,
    candidates,
    count_outcomes,
    coverage_alone,
    first_to_answer,
    fit_cascade,
    is_answered,
    last_certified,
    levels_of,
    shares_of,
)


WORK = (1.0, 3.0, 9.0)


def made_up(stages: int, rows: int, steps: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties, some rows without a score, and errors."""
    random = np.random.default_rng(seed)
    scores = random.integers(0, steps, (stages, rows)) / steps
    scores[0, :5] = math.inf
    return scores, random.random((stages, rows)) < 0.5 * scores.clip(max=1)


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_histogram_counts_what_each_combination_of_thresholds_does(stages):
    scores, wrong = made_up(stages, 200, steps=7)
    levels = [levels_of(stage, 6) for stage in scores]
    counts = count_outcomes(scores, wrong, levels, WORK[:stages], work_of_rest=2.0)
    combinations = list(itertools.product(*levels))
    assert len(combinations) == len(counts.answered)
    for place, thresholds in enumerate(combinations):
        by = first_to_answer(scores, thresholds)
        answered = by < stages
        assert counts.answered[place] == answered.sum(), thresholds
        assert counts.errors[place] == sum(wrong[stage, by == stage].sum() for stage in range(stages)), thresholds
        shares = shares_of(scores, wrong, thresholds, WORK)
        expected = sum(share.work for share in shares) + 2.0 * (~answered).mean()
        assert counts.work[place] == pytest.approx(expected), thresholds


def test_a_row_is_answered_by_the_first_stage_whose_score_is_at_most_its_threshold():
    scores = np.array([[0.1, 0.5, math.nan, math.inf, 0.5], [0.9, 0.2, 0.2, math.inf, 0.9]])
    assert first_to_answer(scores, (0.1, 0.5)).tolist() == [0, 1, 1, 2, 2]
    assert first_to_answer(scores, (-math.inf, math.inf)).tolist() == [1, 1, 1, 2, 1]
    for thresholds in itertools.product((-math.inf, 0.1, 0.5, math.inf), repeat=2):
        one_by_one = [
            next((stage for stage in range(2) if is_answered(row[stage], thresholds[stage])), 2) for row in scores.T
        ]
        assert first_to_answer(scores, thresholds).tolist() == one_by_one


def test_levels_lie_between_scores_that_differ():
    scores = np.array([0.0, 0.0, 0.25, 0.5, 1.0, math.inf])
    assert levels_of(scores, 25).tolist() == [-math.inf, 0.125, 0.375, 0.75, math.inf]
    assert levels_of(np.array([math.inf]), 25).tolist() == [-math.inf]
    assert len(levels_of(np.random.default_rng(0).random(1000), 25)) == 26


def test_candidates_answer_more_or_as_many_with_less_work():
    counts = Counts(np.array([10, 60, 60, 90, 90]), np.array([0, 0, 0, 8, 7]), np.array([1.0, 5, 3, 9, 9]), 100)
    assert candidates(counts, 0.1) == [2, 4]
    slightly_fewer = Counts(np.array([60, 59]), np.array([0, 0]), np.array([5.0, 3.0]), 100)
    assert candidates(slightly_fewer, 0.1) == [0, 1]


def test_the_walk_ends_at_the_first_candidate_that_fails():
    chosen = Counts(np.array([50, 60, 70]), np.array([0, 2, 4]), np.array([1.0, 1, 1]), 100)
    assert candidates(chosen, 0.2) == [0, 1, 2]
    for errors, last in (((0, 2, 4), 2), ((0, 2, 30), 1), ((0, 30, 0), 0), ((30, 0, 0), None)):
        assert last_certified(chosen, replace(chosen, errors=np.array(errors)), 0.2, 0.1) == last, errors


def test_the_shares_are_those_of_the_rows_that_make_the_promise():
    scores, wrong = World(CASES[0]).draw(np.random.default_rng(0))
    fit = fit_cascade(scores, wrong, (1.0, 5.0), risk=0.15)
    second = halves_of(torch.zeros(scores.shape[1]), 0)[1].numpy()
    by = first_to_answer(scores[:, second], fit.thresholds)
    is_wrong = np.concatenate([wrong[stage, second][by == stage] for stage in range(2)])
    assert fit.answered == (by < 2).mean() and fit.wrong == is_wrong.mean() and fit.rows == (250, 250)
    assert fit.work == pytest.approx(sum(stage.work for stage in fit.stages))
    assert "at most 15 % of all final answers are wrong" in fit.guarantee
    assert sum(stage.answered for stage in fit.stages) == pytest.approx(fit.answered)


def test_the_cheapest_is_taken_where_all_rows_can_be_answered():
    scores, wrong = World(CASES[0]).draw(np.random.default_rng(0))
    cheap = fit_cascade(scores, wrong, (1.0, 5.0), risk=0.4)
    assert cheap.answered == 1 and cheap.work == 1  # the first alone
    other = fit_cascade(scores, wrong, (5.0, 1.0), risk=0.4)
    assert other.answered == 1 and other.thresholds[0] == -math.inf and other.work == 1  # the second alone
    assert other.stages[0].reached == 0 and other.stages[0].wrong is None


def test_where_nothing_can_be_promised_the_lowest_risk_is_named():
    scores, wrong = World(CASES[0]).draw(np.random.default_rng(1))
    with pytest.raises(
        ValueError, match=r"risk=0\.01 cannot be guaranteed with 90 % confidence on these 250 rows"
    ) as error:
        fit_cascade(scores, wrong, (1.0, 5.0), risk=0.01)
    lowest = int(re.search(r"the lowest that can be is (\d+) %", str(error.value))[1])
    assert fit_cascade(scores, wrong, (1.0, 5.0), risk=lowest / 100).answered > 0
    with pytest.raises(ValueError, match="cannot be guaranteed"):
        fit_cascade(scores, wrong, (1.0, 5.0), risk=lowest / 100 - 0.01)
    with pytest.raises(ValueError, match="the lowest that can be is none"):
        fit_cascade(np.full((2, 40), math.inf), wrong[:, :40], (1.0, 5.0), risk=0.3)
    with pytest.raises(ValueError, match="stages has 5 that answer: pass 1 to 4"):
        fit_cascade(np.zeros((5, 40)), np.zeros((5, 40)), [1.0] * 5, risk=0.3)


def test_a_stage_alone_makes_the_promise_by_its_own_threshold():
    random = np.random.default_rng(0)
    scores = random.random(300)
    wrong = random.random(300) < 0.3 * scores
    scores[:10] = math.inf  # without an answer
    assert 0.5 < coverage_alone(scores, wrong, 0.1, 0.9) < 1
    assert coverage_alone(scores, np.ones(300, dtype=bool), 0.1, 0.9) is None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_promise_is_broken_at_most_as_often_as_it_says(case):
    found = summarize(case, draws=60)
    assert found["broken"] <= 0.2 and found["without_promise"] < 0.9
    assert found["answered"] > 0.3


def test_the_true_risk_is_that_of_the_made_up_rows():
    for case in (CASES[0], CASES[4], CASES[5], CASES[7]):
        world = World(replace(case, rows=200_000))
        scores, wrong = world.draw(np.random.default_rng(0))
        thresholds = (0.3, 0.5, 0.4)[: len(scores)]
        by = first_to_answer(scores, thresholds)
        answered, risk, work = world.truth(thresholds)
        is_wrong = np.concatenate([wrong[stage, by == stage] for stage in range(len(scores))])
        assert answered == pytest.approx((by < len(scores)).mean(), abs=0.005)
        assert risk == pytest.approx(is_wrong.mean(), abs=0.005)
        assert work == pytest.approx(
            sum(share.work for share in shares_of(scores, wrong, thresholds, case.work)), rel=0.01
        )
