"""Thresholds of several stages in a row, with one bound on the errors of all final answers.

A stage is a model, or anything else that answers rows with a score; lower is surer. A row is
answered by the first stage whose score is at most its threshold. The method is Pareto testing
(Laufer-Goldshtein et al., 2023): half of the rows choose a list of candidates, and its order; the
other half tests them one after the other, and the first one that fails ends the list.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import bdtr

from .abstention import SHIFT, Abstention, check_share
from .calibration import halves_of


# How many shares of its rows each stage may answer, by the number of stages: all combinations are candidates.
LEVELS = {1: 100, 2: 25, 3: 10, 4: 6}
MOST_STAGES = max(LEVELS)


@dataclass(frozen=True)
class StageShares:
    """What a stage does on the rows that make the promise.

    Attributes:
        reached (`float`): the share of all rows that it is asked about.
        answered (`float`): the share of all rows that it answers.
        wrong (`float` or `None`): the share of its answers that are wrong; None without any.
        work (`float`): of it, for a row on average.
    """

    reached: float
    answered: float
    wrong: float | None
    work: float


@dataclass(frozen=True)
class CascadeFit:
    """The thresholds of all stages, and what they promise. Made by `fit_cascade`.

    Attributes:
        thresholds (`tuple[float, ...]`): of each stage; -inf for one that is not asked, inf for
            one that answers all rows that it can.
        risk (`float`), confidence (`float`): with this confidence, at most this share of all final
            answers is wrong.
        rows (`tuple[int, int]`): that chose the candidates, and that make the promise.
        stages (`tuple[StageShares, ...]`): what each stage does on the latter.
        answered (`float`), wrong (`float`): on these, the share of rows that any stage answers,
            and the share of these answers that are wrong.
        work (`float`): of a row on average, over all stages.
    """

    thresholds: tuple[float, ...]
    risk: float
    confidence: float
    rows: tuple[int, int]
    stages: tuple[StageShares, ...]
    answered: float
    wrong: float
    work: float

    @property
    def guarantee(self) -> str:
        """What is promised for new rows, and under which conditions."""
        return (
            f"With {100 * self.confidence:.6g} % confidence at most {100 * self.risk:.6g} % of all final answers are wrong, "
            f"if new rows are independent and of the same distribution as the {self.rows[1]:,} rows that make the promise. "
            f"{SHIFT}"
        )


def fit_cascade(
    scores: np.ndarray,
    wrong: np.ndarray,
    work: Sequence[float],
    risk: float,
    confidence: float = 0.9,
    seed: int = 0,
    work_of_rest: float = 0.0,
) -> CascadeFit:
    """Find thresholds that answer as many rows as possible, such that a risk holds for all answers.

    Whatever the distribution of scores and errors, tied scores included: candidates depend on the
    first half of the rows alone, so that the errors of each among its answers on the second half
    are binomial, and its test is exact.

    Args:
        scores (`np.ndarray`): (stages, rows), inf or NaN where a stage has no answer.
        wrong (`np.ndarray`): (stages, rows), whether each stage's answer is wrong.
        work (`Sequence[float]`): of each stage for a row that it is asked about, in one unit.
        risk (`float`): at most this share of all final answers is wrong.
        confidence (`float`, defaults to 0.9): of the promise.
        seed (`int`, defaults to 0): of the halves, which are those of `calibrate`.
        work_of_rest (`float`, defaults to 0.0): for a row that no stage answers.

    Example:
        >>> random = np.random.default_rng(0)
        >>> scores = random.random((2, 400))
        >>> wrong = random.random((2, 400)) < np.array([[0.3], [0.1]]) * scores
        >>> fit = fit_cascade(scores, wrong, work=(1.0, 4.0), risk=0.1)
        >>> bool(0.5 < fit.answered <= 1 and fit.work < 5)
        True
    """
    check_share(risk, "risk")
    check_share(confidence, "confidence")
    scores = np.where(np.isnan(scores), math.inf, scores)
    wrong = np.asarray(wrong, dtype=bool)
    if len(scores) not in LEVELS:
        raise ValueError(f"stages has {len(scores)} that answer: pass 1 to {MOST_STAGES}, and a person behind them")
    first, second = halves_of(torch.zeros(scores.shape[1]), seed)

    # All combinations of levels, counted on both halves.
    levels = [levels_of(stage[first], LEVELS[len(scores)]) for stage in scores]
    chosen_by = count_outcomes(scores[:, first], wrong[:, first], levels, work, work_of_rest)
    tested_by = count_outcomes(scores[:, second], wrong[:, second], levels, work, work_of_rest)

    place = last_certified(chosen_by, tested_by, risk, 1 - confidence)
    if place is None:
        higher = (percent / 100 for percent in range(math.ceil(100 * risk), 100))
        certified = (
            share for share in higher if last_certified(chosen_by, tested_by, share, 1 - confidence) is not None
        )
        lowest = next(certified, None)
        reached = "none" if lowest is None else f"{100 * lowest:.6g} %"
        raise ValueError(
            f"risk={risk:g} cannot be guaranteed with {100 * confidence:.6g} % confidence on these {len(second)} rows (half of "
            f"data), the lowest that can be is {reached}: pass more rows, a better stage, a higher risk, or a lower confidence"
        )
    places = np.unravel_index(place, [len(level) for level in levels])
    thresholds = tuple(float(level[at]) for level, at in zip(levels, places, strict=True))
    stages = shares_of(scores[:, second], wrong[:, second], thresholds, work)
    answered = int(tested_by.answered[place])
    return CascadeFit(
        thresholds,
        float(risk),
        float(confidence),
        (len(first), len(second)),
        stages,
        answered=answered / len(second),
        wrong=int(tested_by.errors[place]) / answered,
        work=float(tested_by.work[place]),
    )


def is_answered(score: float, threshold: float) -> bool:
    """Whether a stage answers a row with this score."""
    return score <= threshold and score < math.inf and threshold > -math.inf


def first_to_answer(scores: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """Return which stage answers each row, (rows,); the number of stages where none does.

    Args:
        scores (`np.ndarray`): (stages, rows); a stage passes on what is inf or NaN.
        thresholds (`Sequence[float]`): of the stages; one of -inf answers nothing.
    """
    limits = np.asarray(thresholds, dtype=float)[:, None]
    is_answered = (scores <= limits) & (scores < math.inf) & (limits > -math.inf)
    return np.where(is_answered.any(axis=0), is_answered.argmax(axis=0), len(scores))


def shares_of(
    scores: np.ndarray, wrong: np.ndarray, thresholds: Sequence[float], work: Sequence[float]
) -> tuple[StageShares, ...]:
    """Return what each stage does on some rows.

    Args:
        scores, wrong (`np.ndarray`): (stages, rows).
        thresholds, work (`Sequence[float]`): of the stages.
    """
    by = first_to_answer(scores, thresholds)
    stages = []
    for stage, threshold in enumerate(thresholds):
        reached = 0.0
        if threshold > -math.inf:
            reached = float((by >= stage).mean())
        is_answer = by == stage
        errors = None
        if is_answer.any():
            errors = float(wrong[stage, is_answer].mean())
        stages.append(StageShares(reached, float(is_answer.mean()), errors, reached * float(work[stage])))
    return tuple(stages)


def coverage_alone(scores: np.ndarray, wrong: np.ndarray, risk: float, confidence: float) -> float | None:
    """Return the share of rows that one stage answers by itself with the same promise; None where it cannot make it.

    Args:
        scores, wrong (`np.ndarray`): (rows,), of this stage, on the rows that make the promise.
        risk, confidence (`float`): of the promise.
    """
    has_answer = np.isfinite(scores)
    correct = torch.tensor(has_answer & ~wrong)
    scores = torch.tensor(np.where(has_answer, scores, math.inf))
    try:
        return Abstention.fit(scores, correct, risk=risk, confidence=confidence).coverage
    except ValueError:
        return None


# Candidates


@dataclass(frozen=True)
class Counts:
    """What each candidate does on some rows, (candidates,) each.

    answered, errors: rows that any stage answers, and that it answers wrongly
    work: of a row on average
    rows: how many there are
    """

    answered: np.ndarray
    errors: np.ndarray
    work: np.ndarray
    rows: int


def levels_of(scores: np.ndarray, count: int) -> np.ndarray:
    """Return thresholds that answer nothing, about 1 / count, 2 / count ... of the rows, and all.

    Each lies midway between two scores that differ, so that scores that are rounded otherwise do
    not cross it.
    """
    distinct = np.unique(scores[np.isfinite(scores)])
    if len(distinct) == 0:
        return np.array([-math.inf])
    ordered = np.sort(scores[np.isfinite(scores)])
    places = [math.ceil(part * len(ordered) / count) - 1 for part in range(1, count)]
    cuts = np.unique(ordered[places])
    cuts = cuts[cuts < distinct[-1]]
    higher = distinct[np.searchsorted(distinct, cuts, side="right")]
    middle = cuts / 2 + higher / 2
    is_between = (cuts <= middle) & (middle < higher)
    return np.array([-math.inf, *np.where(is_between, middle, cuts), math.inf])


def count_outcomes(
    scores: np.ndarray,
    wrong: np.ndarray,
    levels: Sequence[np.ndarray],
    work: Sequence[float],
    work_of_rest: float,
) -> Counts:
    """Count what every combination of levels does, from a histogram of the rows.

    Args:
        scores, wrong (`np.ndarray`): (stages, rows).
        levels (`Sequence[np.ndarray]`): of each stage, ascending, the first -inf.
        work (`Sequence[float]`), work_of_rest (`float`): as for `fit_cascade`.
    """
    rows = scores.shape[1]
    sizes = [len(level) for level in levels]

    # The lowest level at which each stage would answer a row; past the last one where none does.
    places = []
    for stage, level in zip(scores, levels, strict=True):
        place = np.searchsorted(level, stage, side="left").clip(min=1)
        place[stage == math.inf] = len(level)
        places.append(place.clip(max=len(level)))
    cells = [size + 1 for size in sizes]
    cell_of_row = np.ravel_multi_index(places, cells)

    def histogram(counted: np.ndarray | None = None) -> np.ndarray:
        weights = None if counted is None else counted.astype(float)
        return np.bincount(cell_of_row, weights, minlength=math.prod(cells)).reshape(cells)

    answered = np.zeros(sizes)
    errors = np.zeros(sizes)
    total_work = np.zeros(sizes)
    for stage, work_of_stage in enumerate(work):
        reached = histogram()
        mistaken = histogram(wrong[stage])
        for axis in range(stage):
            reached = _passed_on(reached, axis)
            mistaken = _passed_on(mistaken, axis)
        later = tuple(range(stage + 1, len(sizes)))
        reached = reached.sum(axis=later, keepdims=True)
        mistaken = mistaken.sum(axis=later, keepdims=True)
        answered += _up_to(reached, stage)
        errors += _up_to(mistaken, stage)
        is_asked = (np.arange(sizes[stage]) > 0).reshape([-1 if axis == stage else 1 for axis in range(len(sizes))])
        total_work += is_asked * reached.sum(axis=stage, keepdims=True) * float(work_of_stage)
    total_work += (rows - answered) * work_of_rest
    return Counts(_whole(answered), _whole(errors), total_work.ravel() / rows, rows)


def _whole(counts: np.ndarray) -> np.ndarray:
    return counts.ravel().round().astype(np.int64)


def _up_to(cells: np.ndarray, axis: int) -> np.ndarray:
    """Return how many rows lie in the cells up to each level of an axis."""
    totals = cells.cumsum(axis=axis)
    return np.take(totals, np.arange(cells.shape[axis] - 1), axis=axis)


def _passed_on(cells: np.ndarray, axis: int) -> np.ndarray:
    """Return how many rows lie in the cells behind each level of an axis."""
    return cells.sum(axis=axis, keepdims=True) - _up_to(cells, axis)


# The tests


def last_certified(chosen_by: Counts, tested_by: Counts, risk: float, chance: float) -> int | None:
    """Return the place of the last candidate that passes before one fails; None if the first one fails.

    A candidate is wrongly certified with at most this chance.

    Args:
        chosen_by, tested_by (`Counts`): of the same candidates, on rows that order them, and on
            others.
        risk (`float`), chance (`float`): of the tests.
    """
    order = candidates(chosen_by, risk)
    # The chance of so few errors, if the risk were the target.
    values = bdtr(tested_by.errors[order], tested_by.answered[order], risk)
    passed = int(np.append(values <= chance, False).argmin())
    return order[passed - 1] if passed else None


def candidates(counts: Counts, risk: float) -> list[int]:
    """Return the places of the candidates worth testing, those first that are the likeliest to pass.

    One that is less likely to pass has to be better than those before: it answers more rows, or as
    many, but for half a standard error of their share, with less work.
    """
    chances = bdtr(counts.errors, counts.answered, risk)
    shares = counts.answered / counts.rows
    kept: list[int] = []
    best_share = 0.0
    least_work = math.inf
    for place in np.lexsort((counts.work, -shares, chances)):
        margin = math.sqrt(best_share * (1 - best_share) / counts.rows) / 2
        answers_more = shares[place] > best_share + margin
        is_cheaper = shares[place] >= best_share - margin and counts.work[place] < least_work
        if answers_more or (is_cheaper and kept):
            kept.append(int(place))
            best_share = max(best_share, float(shares[place]))
            least_work = float(counts.work[place])
    return kept
