"""How often promises by class are broken, all together and each, with exact truth.

Rows are made up. The predicted class c of a row is drawn by shares that fall, so that some are rare; its score s is beta-distributed, and
it is wrong with probability difficulty(c) x s. The true risk of each class up to a threshold is then known exactly. The same of groups by
a column: there c is the group of a row.

    python -m experiments.class_promises --output experiments/results/class-promises.json
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import beta

from hydra_transformers.uncertainty.class_promises import (
    ClassTarget,
    GroupedRows,
    fit_class_abstention,
    fit_group_abstention,
)

from .simulations import run_cases


CONFIDENCE = 0.9
SHAPE = (0.6, 2.0)  # of the scores
MOST_STEPS = 4000  # of scores that are not tied, so that all are


@dataclass(frozen=True)
class Case:
    """
    rows: that make the promises, and as many by which classes are pooled
    kind: "prediction" (each keeps the risk), "labels" (one by itself, the others together), "missed", or "column" (one group has a
        risk of its own, of 2 %, each of the others keeps theirs)
    steps: of the scores, few where they are tied
    """

    name: str
    classes: int
    rows: int
    share: float = 0.05
    kind: str = "prediction"
    steps: int = MOST_STEPS


CASES = (
    Case("5 classes, 5,000 rows", 5, 5000),
    Case("5 classes, 500 rows", 5, 500),
    Case("5 classes, 60 rows, 20 %", 5, 60, share=0.2),
    Case("5 classes, 2,000 rows, tied scores", 5, 2000, steps=60),
    Case("20 classes, 2,000 rows", 20, 2000),
    Case("150 classes, 5,000 rows", 150, 5000),
    Case("150 classes, 500 rows, 10 %", 150, 500, share=0.1),
    Case("one label at 2 %, 19 others at 5 %, 2,000 rows", 20, 2000, kind="labels"),
    Case("missed rows of one label, 5 %, 1,000 rows", 5, 1000, kind="missed"),
    Case("missed rows of a rare label, 5 %, 5,000 rows", 20, 5000, kind="missed"),
    Case("missed rows of one label, 5 %, tied scores, 1,000 rows", 5, 1000, kind="missed", steps=20),
    Case("12 groups of a column, one at 2 %, 5,000 rows", 12, 5000, kind="column"),
    Case("40 groups of a column, one at 2 %, 2,000 rows", 40, 2000, kind="column"),
    Case("12 groups of a column, one at 2 %, tied scores, 2,000 rows", 12, 2000, kind="column", steps=60),
)


class World:
    """Classes with their shares and difficulties, and scores on a grid."""

    def __init__(self, case: Case):
        shares = 1 / np.arange(1, case.classes + 1)
        self.shares = shares / shares.sum()
        self.difficulty = np.random.default_rng(case.classes).permutation(np.linspace(0.05, 0.9, case.classes))
        self.grid = np.arange(1, case.steps + 1) / case.steps
        self.masses = np.diff(np.append(0.0, beta.cdf(self.grid, *SHAPE)))

    def draw(self, rows: int, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Predictions, scores and labels; the label of a wrong row is the next class, so that it is the last class's now and then."""
        predictions = random.choice(len(self.shares), rows, p=self.shares)
        scores = self.grid[np.searchsorted(np.cumsum(self.masses)[:-1], random.random(rows))]
        wrong = random.random(rows) < self.difficulty[predictions] * scores
        return predictions, scores, np.where(wrong, (predictions + 1) % len(self.shares), predictions)

    def below(self, threshold: float) -> tuple[float, float]:
        """The share of scores up to a threshold, and their sum."""
        is_below = self.grid <= threshold
        return float(self.masses[is_below].sum()), float((self.masses * self.grid)[is_below].sum())

    def risk(self, classes: tuple[int, ...], threshold: float) -> float:
        """The true risk of the answers with these predictions."""
        share, total = self.below(threshold)
        places = list(classes)
        weights = self.shares[places]
        return float((weights * self.difficulty[places]).sum() / weights.sum() * total / share) if share else 0.0

    def missed(self, label: int, threshold: float) -> float:
        """The true share of the rows of a label that are answered as another: those that were predicted as the class before it."""
        before = label - 1
        mean = float((self.masses * self.grid).sum())
        right = self.shares[label] * (1 - self.difficulty[label] * mean)
        wrong = self.shares[before] * self.difficulty[before]
        return float(wrong * self.below(threshold)[1] / (right + wrong * mean))


def draw(case: Case, world: World, number: int) -> list[bool] | None:
    """Whether each promise is broken; None where none could be made."""
    random = np.random.default_rng([number, case.rows, case.classes])
    first = world.draw(case.rows, random)
    second = world.draw(case.rows, random)
    target = ClassTarget(risks=(case.share,))
    label = 1 if case.classes == 5 else case.classes - 1
    if case.kind == "labels":
        target = ClassTarget(risks=(0.02, case.share), groups=((0,), tuple(range(1, case.classes))))
    if case.kind == "missed":
        target = ClassTarget(missed=case.share, label=label)
    predictions, scores, labels = map(torch.tensor, second)
    names = [str(place) for place in range(case.classes)]
    first_predictions, _, first_labels = map(torch.tensor, first)
    try:
        if case.kind == "column":
            target = ClassTarget.by_column({"risk": {"0": 0.02, "*": case.share}}, names)
            rows = GroupedRows(scores, predictions, predictions == labels)
            others = GroupedRows(None, first_predictions, first_predictions == first_labels)
            fitted = fit_group_abstention(target, CONFIDENCE, rows, others, names, "column")
        else:
            fitted = fit_class_abstention(
                target, CONFIDENCE, scores, predictions, labels, first_predictions, first_labels, names
            )
    except ValueError:
        return None
    if case.kind == "missed":
        return [world.missed(label, fitted.groups[1].threshold) > case.share]
    return [world.risk(group.classes, group.threshold) > group.risk for group in fitted.groups]


def summarize(case: Case, draws: int) -> dict[str, Any]:
    """The share of draws in which any promise is broken, and in which each is, on average; in some none is made, nor broken."""
    world = World(case)
    drawn = [draw(case, world, number) for number in range(draws)]
    found = [one for one in drawn if one is not None]
    shares = {
        "without_promise": 1 - len(found) / draws,
        "broken": sum(any(one) for one in found) / draws,
        "each": sum(sum(one) / len(one) for one in found) / draws,
        "groups": sum(len(one) for one in found) / max(len(found), 1),
    }
    return asdict(case) | {"draws": draws} | shares


def render(content: dict[str, Any]) -> str:
    """A row per case."""
    lines = [["", "groups", "none can be made", "any is broken", "each is broken", "may be, any"], ["---"] * 6]
    for row in content["cases"]:
        shares = [f"{100 * row[name]:.1f} %" for name in ("without_promise", "broken", "each")]
        lines.append([row["name"], f"{row['groups']:.3g}", *shares, f"{100 * (1 - CONFIDENCE):.3g} %"])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    run_cases(__doc__, "class promises", CASES, summarize, arguments)


if __name__ == "__main__":
    main()
