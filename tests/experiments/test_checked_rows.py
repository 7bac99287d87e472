"""A monitor's word on a promise depends on how the checked rows were chosen."""

from dataclasses import replace

import numpy as np
import pytest

from experiments.checked_rows import CASES, RISK, SHAPE, choose, summarize, true_risk


BY_NAME = {case.name: case for case in CASES}


def test_the_true_risk_is_that_of_the_made_up_rows():
    scores = np.random.default_rng(0).beta(*SHAPE, 400_000)
    for threshold in (0.1, 0.3, 0.9):
        assert true_risk(threshold) == pytest.approx(0.5 * scores[scores <= threshold].mean(), rel=0.01)


def test_rows_are_chosen_by_their_order():
    random = np.random.default_rng(0)
    least, surest, drawn = (BY_NAME[name] for name in ("the least sure 20 %", "the surest half", "a random half"))
    assert choose(least, 10, random).tolist() == [8, 9]
    assert choose(surest, 10, random).tolist() == [0, 1, 2, 3, 4]
    assert len(set(choose(drawn, 10, random).tolist())) == 5


@pytest.mark.parametrize(
    ("name", "state", "least", "most"),
    [
        ("a random 20 %", "broken", 0, 0),
        ("the least sure 20 %", "broken", 5, 20),  # although it is kept
        ("the least sure 20 %, marked", "broken", 0, 0),
        ("the surest half", "kept so far", 10, 20),  # although it is broken
        ("the surest half, marked", "kept so far", 0, 0),
        ("a random half", "kept so far", 0, 0),
    ],
)
def test_only_a_random_choice_tells_whether_a_promise_is_kept(name, state, least, most):
    found = summarize(BY_NAME[name], rows=2000, draws=20)["states"][state] * 20
    assert least <= found <= most


def test_a_random_choice_notices_a_risk_that_is_far_too_high():
    case = replace(BY_NAME["a random half"], risk=3 * RISK)
    assert summarize(case, rows=2000, draws=10)["states"]["broken"] == 1
