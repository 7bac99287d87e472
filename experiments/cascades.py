"""How often the promise of a cascade is broken, with exact truth.

Rows are made up. A row has a difficulty d that nobody sees; a stage's score is beta-distributed around d, and its answer is wrong with
probability `errors` x d. Stages are independent given d, so that they tend to be wrong about the same rows. The true risk of any
thresholds is then known exactly.

    python -m experiments.cascades --output experiments/results/cascades.json
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from scipy.stats import beta

from hydra_transformers.uncertainty.cascade import coverage_alone, fit_cascade

from .simulations import run_cases


CONFIDENCE = 0.9
DIFFICULTIES = 50  # a row's difficulty is one of these
SHAPE = (0.5, 1.5)  # of the difficulties


@dataclass(frozen=True)
class Case:
    """
    rows: half of which chooses the candidates, half of which makes the promise
    errors: of each stage: the share of wrong answers to the most difficult rows
    sharpness: of each stage: how closely its score follows the difficulty; 0 for a stage that says the same of all rows
    work: of each stage
    steps: of the scores, few where they are tied; None where none are
    """

    name: str
    rows: int
    risk: float
    errors: tuple[float, ...] = (0.6, 0.25)
    sharpness: tuple[float, ...] = (6.0, 12.0)
    work: tuple[float, ...] = (1.0, 5.0)
    steps: int | None = None


THREE = {"errors": (0.7, 0.4, 0.2), "sharpness": (4.0, 8.0, 16.0), "work": (1.0, 5.0, 25.0)}
CASES = (
    Case("two stages, 500 rows, 10 %", 500, 0.1),
    Case("two stages, 2,000 rows, 5 %", 2000, 0.05),
    Case("two stages, 5,000 rows, 5 %", 5000, 0.05),
    Case("two stages, 60 rows, 20 %", 60, 0.2),
    Case("tied scores, 500 rows, 10 %", 500, 0.1, steps=8),
    Case("three stages, 500 rows, 10 %", 500, 0.1, **THREE),
    Case("three stages, 2,000 rows, 5 %", 2000, 0.05, **THREE),
    Case("the last answers all rows or none, 500 rows, 10 %", 500, 0.1, sharpness=(6.0, 0.0)),
    Case("two stages, 500 rows, 25 %: all are answered", 500, 0.25),
)


class World:
    """Difficulties with their masses, and how stages score and err."""

    def __init__(self, case: Case):
        self.case = case
        edges = np.linspace(0, 1, DIFFICULTIES + 1)
        self.difficulties = (edges[:-1] + edges[1:]) / 2
        self.masses = np.diff(beta.cdf(edges, *SHAPE))

    def draw(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Scores and whether each stage is wrong, (stages, rows)."""
        difficulty = random.choice(self.difficulties, self.case.rows, p=self.masses)
        scores = []
        wrong = []
        for errors, sharpness in zip(self.case.errors, self.case.sharpness, strict=True):
            if sharpness == 0:
                score = np.zeros(self.case.rows)
            else:
                score = random.beta(*_parameters(difficulty, sharpness))
            if self.case.steps is not None:
                score = np.ceil(score * self.case.steps) / self.case.steps
            scores.append(score)
            wrong.append(random.random(self.case.rows) < errors * difficulty)
        return np.array(scores), np.array(wrong)

    def below(self, stage: int, threshold: float) -> np.ndarray:
        """The chance of a score up to a threshold, by difficulty."""
        sharpness = self.case.sharpness[stage]
        if sharpness == 0 or not np.isfinite(threshold):
            return np.full(DIFFICULTIES, float(threshold >= 0))
        if self.case.steps is not None:
            threshold = np.floor(threshold * self.case.steps) / self.case.steps
        return beta.cdf(threshold, *_parameters(self.difficulties, sharpness))

    def truth(self, thresholds: tuple[float, ...]) -> tuple[float, float, float]:
        """The share of rows that are answered, the share of wrong answers, and the work of a row."""
        remaining = self.masses.copy()
        answered = wrong = work = 0.0
        for stage, threshold in enumerate(thresholds):
            if threshold == -np.inf:  # it is not asked
                continue
            work += remaining.sum() * self.case.work[stage]
            answers = remaining * self.below(stage, threshold)
            answered += answers.sum()
            wrong += (answers * self.case.errors[stage] * self.difficulties).sum()
            remaining -= answers
        return float(answered), float(wrong / answered), float(work)


def _parameters(difficulty: np.ndarray, sharpness: float) -> tuple[np.ndarray, np.ndarray]:
    """Of the beta distribution of scores around a difficulty."""
    return sharpness * difficulty, sharpness * (1 - difficulty)


def summarize(case: Case, draws: int) -> dict[str, Any]:
    """The share of draws whose promise is broken, and means over those in which one could be made."""
    world = World(case)
    without = 0
    broken = 0
    reached = []
    alone = []
    for number in range(draws):
        scores, wrong = world.draw(np.random.default_rng([number, case.rows, len(case.work)]))
        # As many rows as make the promise of the cascade.
        half = case.rows // 2
        alone.append(coverage_alone(scores[-1, :half], wrong[-1, :half], case.risk, CONFIDENCE) or 0.0)
        try:
            fit = fit_cascade(scores, wrong, case.work, case.risk, CONFIDENCE)
        except ValueError:
            without += 1
            reached.append((0.0, 0.0))
            continue
        answered, risk, work = world.truth(fit.thresholds)
        broken += risk > case.risk
        reached.append((answered, work))
    answered, work = np.mean(reached, axis=0)
    made = max(draws - without, 1)
    found = {
        "without_promise": without / draws,
        "broken": broken / draws,
        "answered": float(answered),
        "work": float(work) * draws / made / case.work[-1],
        "last_alone": float(np.mean(alone)),
    }
    return asdict(case) | {"draws": draws} | found


def render(content: dict[str, Any]) -> str:
    """A row per case."""
    lines = [
        [
            "",
            "none can be made",
            "answered",
            "by the last stage alone",
            "work, of the last stage's",
            "broken",
            "may be",
        ]
    ]
    lines.append(["---"] * len(lines[0]))
    for row in content["cases"]:
        shares = [f"{100 * row[name]:.1f} %" for name in ("without_promise", "answered", "last_alone")]
        lines.append(
            [
                row["name"],
                *shares,
                f"{row['work']:.2f}",
                f"{100 * row['broken']:.1f} %",
                f"{100 * (1 - CONFIDENCE):.3g} %",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    run_cases(__doc__, "cascades", CASES, summarize, arguments)


if __name__ == "__main__":
    main()
