"""When to abstain where a wrong answer and a review have a price: the threshold of the least expected cost."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from scipy.special import bdtr
from torch import Tensor

from .abstention import SHIFT, Abstention, just_above


DEFAULT_INTERVAL = 0.9  # of the costs that are printed, where no confidence is asked for


@dataclass(frozen=True)
class CostTarget:
    """The price of each outcome of a row, in any unit.

    wrong: of a wrong answer; a right one costs nothing
    review: of a row that is not answered
    matrix: (labels, predictions), in place of `wrong`: of each answer by the row's label
    """

    review: float
    wrong: float | None = None
    matrix: tuple[tuple[float, ...], ...] | None = None

    @classmethod
    def of(cls, target: Any, num_classes: int | None) -> "CostTarget":
        """Read {"cost": {"wrong": 20, "review": 1}} or {"cost": {"matrix": [[...]], "review": 1}}.

        Args:
            target (`dict`): the target of `calibrate`.
            num_classes (`int`, *optional*): of the model, which a matrix has to fit.
        """
        prices = target["cost"]
        known = isinstance(prices, Mapping) and set(prices) in ({"wrong", "review"}, {"matrix", "review"})
        if not known or len(target) != 1:
            raise ValueError(
                f"target is {target!r}: pass {{'cost': {{'wrong': 20, 'review': 1}}}}, or a matrix in place of wrong"
            )
        review = _price(prices["review"], "review")
        if "wrong" in prices:
            return cls(review, wrong=_price(prices["wrong"], "wrong"))
        rows = [[_price(cell, "an entry of matrix", least=0.0) for cell in row] for row in prices["matrix"]]
        if num_classes is None or [len(row) for row in rows] != [num_classes] * num_classes:
            raise ValueError(
                f"matrix has rows of {[len(row) for row in rows]} prices: pass a row for each of {num_classes} labels"
            )
        return cls(review, matrix=tuple(map(tuple, rows)))

    @property
    def highest(self) -> float:
        """The most that a row can cost."""
        of_answers = [self.wrong] if self.matrix is None else [price for row in self.matrix for price in row]
        return max(self.review, *of_answers)

    def of_answers(self, predictions: Tensor, labels: Tensor) -> Tensor:
        """Return what each row costs if it is answered, (rows,) in float64."""
        if self.matrix is None:
            return self.of_errors(predictions != labels)
        return torch.tensor(self.matrix, dtype=torch.float64)[labels, predictions]

    def of_errors(self, wrong: Tensor) -> Tensor:
        """Return what each row costs if it is answered, (rows,) in float64, by whether it is wrong."""
        return wrong.double() * self.wrong


class PricedRows(NamedTuple):
    """Rows with what they cost, (rows,) each.

    scores: by which they are answered
    costs: if they are answered
    wrong: bool, whether they are
    """

    scores: Tensor
    costs: Tensor
    wrong: Tensor


@dataclass(frozen=True)
class Estimate:
    """A mean cost per row on the fitting rows, and the interval of the true one."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.4g} ({self.low:.4g} to {self.high:.4g})"


@dataclass(frozen=True)
class CostAbstention(Abstention):
    """An `Abstention` by costs. Costs are those of rows that did not choose the threshold.

    Attributes:
        cost (`Estimate`): of a row with this threshold.
        cost_without (`Estimate`): if every row were answered.
        cost_at_best (`Estimate`): if exactly those rows were reviewed whose answer costs more than a review.
        interval (`float`): how sure the intervals are, each by itself.
    """

    cost: Estimate = Estimate(0.0, 0.0, 0.0)
    cost_without: Estimate = Estimate(0.0, 0.0, 0.0)
    cost_at_best: Estimate = Estimate(0.0, 0.0, 0.0)
    interval: float = DEFAULT_INTERVAL

    @property
    def guarantee(self) -> str:
        if self.confidence is None:
            return f"No guarantee. {SHIFT}"
        return (
            f"With {100 * self.confidence:.6g} % confidence a row costs at most {self.value:.4g} on average, if new rows are independent "
            f"and of the same distribution as the {self.rows} fitting rows. {SHIFT}"
        )

    @property
    def sentence(self) -> str:
        costs = f"a row costs {self.cost}, {self.cost_without} if all are answered, and {self.cost_at_best} at best"
        answered = f"{100 * self.coverage:.3g} % are answered"
        intervals = f"in brackets intervals of {100 * self.interval:.3g} %"
        return f"Of the {self.rows:,} fitting rows, {answered}: {costs} ({intervals}). {self.guarantee}"


def fit_costs(
    target: CostTarget, confidence: float | None, chosen_by: PricedRows, measured_by: PricedRows
) -> CostAbstention:
    """Find the threshold of the least cost on some rows, and say what it costs by others.

    Args:
        target (`CostTarget`): the prices.
        confidence (`float`, *optional*): of a bound on the cost; None for no bound.
        chosen_by (`PricedRows`): rows by which the threshold is chosen. A score that was fitted on them would be lower
            than on new rows.
        measured_by (`PricedRows`): other rows, by which costs are estimated.
    """
    threshold = cheapest_threshold(chosen_by.scores, chosen_by.costs, target.review)
    scores, of_answers, wrong = measured_by
    answered = scores <= threshold
    review = torch.full_like(of_answers, target.review)
    costs = torch.where(answered, of_answers, review)
    level = confidence or DEFAULT_INTERVAL
    estimates = [
        estimate_mean(part, target.highest, level) for part in (costs, of_answers, torch.minimum(of_answers, review))
    ]
    bound = estimates[0].mean
    if confidence is not None:
        bound = highest_mean(float(costs.mean()), len(costs), target.highest, 1 - confidence)
    coverage = float(answered.double().mean())
    return CostAbstention(
        threshold,
        "cost",
        bound,
        confidence,
        len(scores),
        0,
        coverage=coverage,
        risk=float(wrong[answered].double().mean()) if answered.any() else None,
        risk_without=float(wrong.double().mean()),
        fpr=1 - coverage,
        tpr=None,
        cost=estimates[0],
        cost_without=estimates[1],
        cost_at_best=estimates[2],
        interval=level,
    )


def cheapest_threshold(scores: Tensor, of_answers: Tensor, review: float) -> float:
    """Return the threshold up to which answering costs the least in all; -inf where it is cheapest to review every row.

    Args:
        scores (`Tensor`): (rows,); rows of equal score are all answered, or none.
        of_answers (`Tensor`): (rows,), what each row costs if it is answered.
        review (`float`): what a row costs that is not answered.
    """
    order = scores.argsort(stable=True)
    ordered = scores[order]
    gains = (of_answers[order] - review).cumsum(dim=0)  # what answering the first rows costs more than reviewing them
    is_end = torch.cat([ordered[1:] > ordered[:-1], torch.ones(1, dtype=torch.bool)])
    places = is_end.nonzero().flatten()
    best = places[gains[places].argmin()]
    if gains[best] >= 0:
        return -math.inf
    dtype = scores.dtype if scores.dtype == torch.float64 else torch.float32
    return just_above(float(ordered[best]), scores, dtype)


def estimate_mean(values: Tensor, highest: float, confidence: float) -> Estimate:
    """Return the mean of values between 0 and `highest`, and an interval of the true mean."""
    mean, rows, chance = float(values.mean()), len(values), (1 - confidence) / 2
    low = highest - highest_mean(highest - mean, rows, highest, chance)
    return Estimate(mean, max(low, 0.0), highest_mean(mean, rows, highest, chance))


def highest_mean(mean: float, rows: int, highest: float, chance: float) -> float:
    """Return an upper bound of a true mean, which is above it with at most this chance, whatever the distribution.

    It inverts the test of Hoeffding and Bentkus: of means above the found one, those are ruled out that would give so low a one with
    a smaller chance.

    Args:
        mean (`float`), rows (`int`): of the found values, which lie between 0 and `highest`.
        highest (`float`): what a value can be at most.
        chance (`float`): of a true mean above the bound.
    """
    found = mean / highest
    low, high = found, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        is_ruled_out = _chance_of_less(found, middle, rows) <= chance
        if is_ruled_out:
            high = middle
        else:
            low = middle
    return high * highest


def _chance_of_less(found: float, true: float, rows: int) -> float:
    """A bound of the chance that the mean of rows in [0, 1] is at most `found`, if the true mean is `true`."""
    if true >= 1:
        return 0.0 if found < 1 else 1.0
    distance = 0.0
    if found < true:
        distance = (1 - found) * math.log((1 - found) / (1 - true))
        if found > 0:
            distance += found * math.log(found / true)
    bentkus = math.e * float(bdtr(math.ceil(rows * found - 1e-9), rows, true))
    return min(math.exp(-rows * distance), bentkus)


def is_cost(target: Any) -> bool:
    """Whether a target is about costs."""
    return isinstance(target, Mapping) and "cost" in target


def _price(value: Any, name: str, least: float = math.ulp(0.0)) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not least <= value < math.inf:
        raise ValueError(f"{name} is {value!r}: pass a price, such as 20, in the unit of the others")
    return float(value)


def parse_prices(prices: Sequence[tuple[str, str]]) -> dict[str, float]:
    """Return {"wrong": 20.0, "review": 1.0} for such pairs of texts."""
    if sorted(name for name, _ in prices) != ["review", "wrong"]:
        raise ValueError("prices are of wrong and review: pass both, such as wrong=20 and review=1")
    try:
        return {name: float(price) for name, price in prices}
    except ValueError as error:
        raise ValueError(f"a price is no number: {error}") from error
