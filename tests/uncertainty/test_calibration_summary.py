"""The two lines that `calibrate` prints say what is promised, and what is answered."""

import pytest
import torch

from hydra_transformers.uncertainty import Abstention
from hydra_transformers.uncertainty.calibration_summary import NEVER_ABSTAINS, summarize_abstention


SCORES = torch.arange(400) / 400
IS_CORRECT = torch.arange(400) < 380


def test_a_guaranteed_risk_is_promised_with_its_confidence():
    rule = Abstention.fit(SCORES, IS_CORRECT, risk=0.05, confidence=0.9)
    promise, answers = summarize_abstention(rule)
    expected = (
        "Promised with 90 % confidence, for data like the validation rows: at most 5 % of its answers are wrong."
    )
    assert promise == expected
    assert answers.startswith(f"Of the 400 rows that set the threshold it answers {100 * rule.coverage:.3g} %: ")
    assert answers.endswith(" of the answers are wrong, 5 % if it answered all.")


@pytest.mark.parametrize(
    ("target", "what"),
    [
        ({"risk": 0.01}, "at most 1 % of its answers are wrong"),
        ({"coverage": 0.8}, "at least 80 % of the rows are answered"),
        ({"tpr": 0.7}, "at least 70 % of the out-of-distribution rows are not answered"),
    ],
)
def test_without_a_confidence_nothing_is_promised(target, what):
    others = {"ood_scores": SCORES + 0.5} if "tpr" in target else {}
    promise, _ = summarize_abstention(Abstention.fit(SCORES, IS_CORRECT, **target, **others))
    assert promise == f"Aimed at, not promised (for that, pass a confidence): {what}."


def test_a_model_without_a_target_is_told_that_it_never_abstains():
    assert summarize_abstention(None) == [NEVER_ABSTAINS]
