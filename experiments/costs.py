"""How often the bound on a cost is broken, and what the chosen threshold costs beside the best one, with exact truth.

Rows are made up: a row of score s is wrong with probability `difficulty` x s, so that the true cost of every threshold is known.

    python -m experiments.costs --output experiments/results/costs.json
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from hydra_transformers.uncertainty.costs import CostTarget, PricedRows, fit_costs

from .simulations import run_cases


CONFIDENCE = 0.9
SHAPE = (0.6, 2.0)  # of the scores
MOST_STEPS = 4000  # of scores that are not tied, so that all are


@dataclass(frozen=True)
class Case:
    """
    rows: that choose the threshold, and as many that estimate the cost
    steps: of the scores, few where they are tied
    """

    name: str
    rows: int
    wrong: float = 20.0
    review: float = 1.0
    difficulty: float = 0.5
    steps: int = MOST_STEPS


CASES = (
    Case("wrong 20, review 1; 1,000 rows", 1000),
    Case("wrong 20, review 1; 60 rows", 60),
    Case("wrong 20, review 1; 5,000 rows", 5000),
    Case("tied scores, 1,000 rows", 1000, steps=20),
    Case("wrong 200, review 1; 1,000 rows", 1000, wrong=200.0),
    Case("wrong 2, review 1; 1,000 rows", 1000, wrong=2.0),
    Case("few errors, 1,000 rows", 1000, difficulty=0.02),
)


class World:
    """Scores on a grid, with their masses, and what a row of each costs if it is answered."""

    def __init__(self, case: Case):
        self.case = case
        self.grid = np.arange(1, case.steps + 1) / case.steps
        self.masses = np.diff(np.append(0.0, beta.cdf(self.grid, *SHAPE)))

    def draw(self, random: np.random.Generator, target: CostTarget) -> PricedRows:
        """Rows with their prices."""
        places = np.searchsorted(np.cumsum(self.masses)[:-1], random.random(self.case.rows))
        scores = self.grid[places]
        wrong = torch.tensor(random.random(len(scores)) < self.case.difficulty * scores)
        return PricedRows(torch.tensor(scores), target.of_errors(wrong), wrong)

    def cost(self, threshold: float) -> float:
        """The true mean cost."""
        of_answers = self.case.wrong * self.case.difficulty * self.grid
        return float((self.masses * np.where(self.grid <= threshold, of_answers, self.case.review)).sum())

    def least_cost(self) -> float:
        return min(self.cost(threshold) for threshold in (-np.inf, *self.grid))


def summarize(case: Case, draws: int) -> dict[str, Any]:
    """The share of draws whose bound is below the true cost, and mean costs."""
    world = World(case)
    target = CostTarget(case.review, wrong=case.wrong)
    broken = 0
    costs = []
    bounds = []
    for number in range(draws):
        random = np.random.default_rng([number, case.rows])
        chosen_by = world.draw(random, target)
        measured_by = world.draw(random, target)
        fitted = fit_costs(target, CONFIDENCE, chosen_by, measured_by)
        costs.append(world.cost(fitted.threshold))
        bounds.append(fitted.value)
        broken += costs[-1] > fitted.value
    found = {"broken": broken / draws, "cost": float(np.mean(costs)), "bound": float(np.mean(bounds))}
    return asdict(case) | {"draws": draws, "without": world.cost(np.inf), "least": world.least_cost()} | found


def render(content: dict[str, Any]) -> str:
    """A row per case."""
    header = ["", "all answered", "best threshold", "chosen threshold", "bound", "bound is broken", "may be"]
    lines = [header, ["---"] * len(header)]
    for row in content["cases"]:
        costs = [f"{row[name]:.3g}" for name in ("without", "least", "cost", "bound")]
        lines.append([row["name"], *costs, f"{100 * row['broken']:.1f} %", f"{100 * (1 - CONFIDENCE):.3g} %"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    run_cases(__doc__, "costs", CASES, summarize, arguments)


if __name__ == "__main__":
    main()
