"""How often the promise of a model that was calibrated again by audited answers is broken, with exact truth.

Each draw calibrates on new rows, answers others, of which a random share is audited, and calibrates again. Rows are made up: a row of
score s is wrong with probability s / 2, after a shift more often by one factor, so that the true risk of every threshold is known.

    python -m experiments.recalibration --output experiments/results/recalibration.json
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from hydra_transformers.uncertainty.abstention import Abstention
from hydra_transformers.uncertainty.recalibration import AnsweredRows, lower_threshold

from .checked_rows import CONFIDENCE, RISK, SHAPE, true_risk
from .simulations import run_cases


@dataclass(frozen=True)
class Case:
    """
    rows: on which the first threshold is fitted
    first_risk: that was promised first
    answers: of which so many are audited
    factor: how much more often rows are wrong after the first calibration
    with_validation: whether the rows of the first calibration are used again
    steps: of the scores, which then have ties; 0 for none
    """

    name: str
    rows: int = 500
    first_risk: float = 2 * RISK
    answers: int = 500
    factor: float = 1.0
    with_validation: bool = True
    steps: int = 0

    @property
    def is_valid(self) -> bool:
        return self.factor == 1 or not self.with_validation


CASES = (
    Case("500 validation rows, 500 audited answers"),
    Case("the same, promised 5 % before", first_risk=RISK),
    Case("2,000 validation rows, 200 audited answers, promised 6 % before", rows=2000, answers=200, first_risk=0.06),
    Case("100 validation rows, 300 audited answers", rows=100, answers=300),
    Case("2,000 validation rows, 2,000 audited answers", rows=2000, answers=2000),
    Case("tied scores", steps=40),
    Case("audited answers alone", with_validation=False),
    Case("errors x 1.5, audited answers alone", factor=1.5, with_validation=False),
    Case("errors x 1.5, tied scores, audited answers alone", factor=1.5, with_validation=False, steps=40),
    Case("errors x 1.5, with the rows from before", rows=2000, factor=1.5),
)


def draw_scores(case: Case, count: int, random: np.random.Generator) -> np.ndarray:
    scores = random.beta(*SHAPE, count)
    return np.ceil(scores * case.steps) / case.steps if case.steps else scores


def draw_wrong(case: Case, scores: np.ndarray, factor: float, random: np.random.Generator) -> np.ndarray:
    """Rows of a tied score are wrong with the probability of the score that they were rounded up to."""
    return random.random(len(scores)) < 0.5 * factor * scores


def risk_of(case: Case, threshold: float) -> float:
    """The true risk up to a threshold, before any shift."""
    if not case.steps:
        return true_risk(min(threshold, 1.0))
    cuts = np.arange(1, case.steps + 1) / case.steps
    masses = np.diff(np.append(0.0, _cumulative(cuts)))
    is_answered = cuts <= threshold
    return float(0.5 * (masses * cuts)[is_answered].sum() / masses[is_answered].sum())


def _cumulative(values: np.ndarray) -> np.ndarray:
    from scipy.stats import beta

    return beta.cdf(values, *SHAPE)


def draw(case: Case, number: int) -> tuple[bool, float] | None:
    """Whether the new promise is broken, and the new threshold as a share of the first; None where none can be made."""
    random = np.random.default_rng([number, case.rows])
    scores = draw_scores(case, case.rows, random)
    wrong = draw_wrong(case, scores, 1.0, random)
    try:
        first = Abstention.fit(torch.tensor(scores), ~torch.tensor(wrong), risk=case.first_risk, confidence=CONFIDENCE)
        new_scores = np.empty(0)
        while len(new_scores) < case.answers:
            more = draw_scores(case, 2 * case.answers, random)
            new_scores = np.append(new_scores, more[more <= first.threshold])
        new_scores = new_scores[: case.answers]
        new_wrong = draw_wrong(case, new_scores, case.factor, random)
        if case.with_validation:
            places = scores <= first.threshold
            new_scores = np.append(scores[places], new_scores)
            new_wrong = np.append(wrong[places], new_wrong)
        fitted = lower_threshold(AnsweredRows(new_scores, new_wrong), first.threshold, RISK, CONFIDENCE)
    except ValueError:
        return None
    risk = case.factor * risk_of(case, fitted.threshold)
    return risk > RISK, fitted.threshold / first.threshold


def summarize(case: Case, draws: int) -> dict[str, Any]:
    """The share of draws whose new promise is broken."""
    found: list[tuple[bool, float]] = []
    number = 0
    while len(found) < draws:
        one = draw(case, number)
        found += [] if one is None else [one]
        number += 1
    broken = float(np.mean([is_broken for is_broken, _ in found]))
    return asdict(case) | {
        "is_valid": case.is_valid,
        "draws": draws,
        "without_promise": number - draws,
        "broken": broken,
    }


def render(content: dict[str, Any]) -> str:
    """A row per case."""
    lines = [["calibrated again with", "promised", "broken in", "may be broken in"], ["---"] * 4]
    for row in content["cases"]:
        allowed = f"{100 * (1 - CONFIDENCE):.3g} %" if row["is_valid"] else "not a valid way"
        lines.append([row["name"], f"{100 * RISK:.3g} % wrong", f"{100 * row['broken']:.1f} % of draws", allowed])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    run_cases(__doc__, "recalibration", CASES, summarize, arguments)


if __name__ == "__main__":
    main()
