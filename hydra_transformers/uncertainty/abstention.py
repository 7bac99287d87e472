"""When not to answer: a threshold on an uncertainty score, fitted on validation data for a target."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import numpy as np
import torch
from scipy.special import bdtr
from torch import Tensor

from .few_rows import note_on_risk, note_on_share
from .inputs import as_scores, as_tensor, in_float64, widened


TARGETS = ("risk", "coverage", "tpr")
# Where the tests of a guaranteed risk start, as shares of the rows; fixed before any label is seen.
STARTS = (Fraction(1, 8), Fraction(1, 4), Fraction(1, 2), Fraction(3, 4), Fraction(1))
SHIFT = "Nothing holds under distribution shift."


@dataclass(frozen=True)
class Abstention:
    """Answer if the score is at most `threshold`, abstain if it is higher. Made by `fit`; shares are fractions.

    Attributes:
        threshold (`float`): rows that score higher are not answered; rows of equal score are all answered, or none. It lies
            midway between two scores of the fitting rows, so that scores that are rounded otherwise do not cross it.
        target (`str`), value (`float`): "risk", "coverage" or "tpr", and its value.
        confidence (`float` or `None`): of the guarantee; `None` without one.
        rows (`int`), ood_rows (`int`): how many rows it was fitted on.
        coverage (`float`), fpr (`float`): share of the (in-distribution) fitting rows that are answered, and that are not.
        risk, risk_without (`float` or `None`): share of wrong answers, or mean error, of the answered rows and of all;
            `None` without either.
        tpr (`float` or `None`): share of the out-of-distribution rows that are not answered; `None` without any.
        unit (`str`): what is counted, for sentences.
        is_share (`bool`): whether a risk is a share of errors, and not a mean error of any size.
    """

    threshold: float
    target: str
    value: float
    confidence: float | None
    rows: int
    ood_rows: int
    coverage: float
    risk: float | None
    risk_without: float | None
    fpr: float
    tpr: float | None
    unit: str = "rows"
    is_share: bool = True

    @classmethod
    def fit(
        cls,
        scores: Any,
        correct: Any = None,
        ood_scores: Any = None,
        *,
        risk: float | None = None,
        coverage: float | None = None,
        tpr: float | None = None,
        confidence: float | None = None,
        errors: Any = None,
        unit: str = "rows",
        others: Any = None,
    ) -> "Abstention":
        """Find the threshold that reaches one target: `risk`, `coverage` or `tpr`.

        Args:
            scores: (samples,), any uncertainty score of in-distribution validation rows; higher is more uncertain.
            correct: (samples,), whether the model is right about each; needed for `risk`.
            ood_scores: (samples,), the score of out-of-distribution rows; needed for `tpr`.
            risk: at most this share of the answers is wrong; the largest coverage that keeps it.
            coverage: at least this share is answered; the lowest threshold that does.
            tpr: at least this share of `ood_scores` is refused; the highest threshold that does. Its price is `fpr`.
            confidence: with 0.95, say, the target holds for new rows, not only for these, in 95 % of all fits: see below.
            errors: (samples,), in place of `correct` errors of any size; a risk is then their mean, and has no confidence.
            unit: what each score is of, for sentences.
            others: (samples,), scores of further rows that rounding shall not move across the threshold either.

        The guarantees need new rows that are independent and of the same distribution as these (for `tpr`, as
        `ood_scores`), and no row that the model or the score was fitted or chosen on. They assume nothing else:

            coverage, tpr  the k-th of n sorted scores, with the least k for which P(Bin(n, target) < k) >= confidence
            risk           fixed-sequence tests as in Learn then Test (Angelopoulos et al., 2021). Rows are answered one more
                           at a time, the surest first; each time the hypothesis "the risk is above the target" is tested
                           with the exact binomial tail, and the first test that does not reject it ends the walk. Walks
                           start at up to four fixed shares of the rows, which divide 1 - confidence among them

        Example:
            >>> rule = Abstention.fit([0.1, 0.2, 0.3, 0.8, 0.9], correct=[1, 1, 1, 0, 1], risk=0.1)
            >>> rule.threshold, rule.coverage, rule.risk, rule.risk_without
            (0.55, 0.6, 0.0, 0.2)
            >>> rule.abstain([0.25, 0.61])
            tensor([False,  True])
        """
        target, value = check_target({"risk": risk, "coverage": coverage, "tpr": tpr}, is_share=errors is None)
        if confidence is not None:
            confidence = check_share(confidence, "confidence")
        is_wide = all(in_float64(part).dtype == torch.float64 for part in (scores, ood_scores) if part is not None)
        dtype = torch.float64 if is_wide else torch.float32
        is_share = errors is None
        scores, errors, ood_scores = _checked(scores, correct, ood_scores, errors)
        if {"risk": errors, "tpr": ood_scores}.get(target, scores) is None:
            raise ValueError(f"a {target} is fitted on {'correct' if target == 'risk' else 'ood_scores'}: pass it")
        further = [as_scores(part, "others") for part in (ood_scores, others) if part is not None]
        all_scores = torch.cat([scores, *further])
        if target == "risk":
            threshold = just_above(_threshold_of_risk(scores, errors, value, confidence), all_scores, dtype)
        elif target == "coverage":
            threshold = just_above(_threshold_of_share(scores, value, confidence, "coverage"), all_scores, dtype)
        else:
            lowest_refused = -_threshold_of_share(-ood_scores, value, confidence, "tpr")
            threshold = just_below(lowest_refused, all_scores, dtype)  # that score itself is refused
            if threshold == lowest_refused:
                raise ValueError(f"tpr={value:g} cannot be reached: too many of ood_scores are -inf")
        counts = len(scores), 0 if ood_scores is None else len(ood_scores)
        shares = _shares(threshold, scores, errors, ood_scores)
        return cls(threshold, target, value, confidence, *counts, **shares, unit=unit, is_share=is_share)

    def abstain(self, scores: Any) -> Tensor:
        """Which rows not to answer: a bool tensor of the scores' shape. NaN is not answered either."""
        return ~(widened(in_float64(scores).detach()) <= self.threshold)

    @property
    def guarantee(self) -> str:
        """What is promised for new rows, and under which conditions."""
        if self.confidence is None:
            missed = f"No guarantee: the target holds on the fitting rows, new rows may miss it. {SHIFT}"
            return f"{missed} {self._note_on_few_rows}".rstrip()
        promise = {
            "risk": f"at most {_percent(self.value)} of the answered {self.unit} are wrong",
            "coverage": f"at least {_percent(self.value)} of the {self.unit} are answered",
            "tpr": f"at least {_percent(self.value)} of the out-of-distribution {self.unit} are refused",
        }[self.target]
        rows = f"{self.ood_rows} out-of-distribution" if self.target == "tpr" else str(self.rows)
        return (
            f"With {_percent(self.confidence)} confidence {promise}, if new rows are independent and of the same "
            f"distribution as the {rows} fitting rows. {SHIFT}"
        )

    @property
    def _note_on_few_rows(self) -> str:
        """How far the target may be missed on new rows; empty where there were many."""
        answered = round(self.coverage * self.rows)
        if self.target == "tpr" and self.tpr is not None:
            refused = round(self.tpr * self.ood_rows)
            return note_on_share(refused, self.ood_rows, "of new out-of-distribution rows are refused")
        if self.target == "coverage":
            return note_on_share(answered, self.rows, f"of new {self.unit} are answered")
        if self.risk is not None and self.is_share:
            return note_on_risk(round(self.risk * answered), answered, self.unit)
        return ""

    @staticmethod
    def _effect_on_errors(risk: float, risk_without: float) -> str:
        if risk == risk_without or _rounded(risk) == _rounded(risk_without):
            return f"leaves errors at {_rounded(risk)}"
        verb = "cuts" if risk < risk_without else "raises"
        return f"{verb} errors from {_rounded(risk_without)} to {_rounded(risk)}"

    @property
    def sentence(self) -> str:
        """The effect of abstaining on the fitting rows, and the guarantee."""
        effect = f"{_rounded(self.coverage)} are answered"
        if self.risk is not None and self.risk_without is not None:
            effect = f"answering {_rounded(self.coverage)} {self._effect_on_errors(self.risk, self.risk_without)}"
        if self.tpr is not None:
            effect += f"; {_rounded(self.tpr)} of the out-of-distribution {self.unit} are refused"
        return f"Of the {self.rows:,} fitting {self.unit}, {effect}. {self.guarantee}"


def _percent(share: float) -> str:
    return f"{100 * share:.6g} %"


def _rounded(share: float) -> str:
    return f"{100 * share:.3g} %"


def just_above(score: float, scores: Tensor, dtype: torch.dtype) -> float:
    """A threshold midway between a score and the next higher of `scores`, in the scores' dtype."""
    higher = scores[scores > score]
    return _between(score, float(higher.min()) if len(higher) else score + _half_spacing(scores), dtype)


def just_below(score: float, scores: Tensor, dtype: torch.dtype) -> float:
    """A threshold midway between a score and the next lower of `scores`, below it in the scores' dtype."""
    lower = scores[scores < score]
    middle = _between(float(lower.max()) if len(lower) else score - _half_spacing(scores), score, dtype)
    next_lower = torch.nextafter(*torch.tensor([score, -math.inf], dtype=dtype, device="cpu"))
    return middle if middle < score else float(next_lower)


def _half_spacing(scores: Tensor) -> float:
    finite = scores[scores.isfinite()]
    return float(finite.max() - finite.min()) / (2 * len(finite)) if len(finite) else 0.0


def _between(low: float, high: float, dtype: torch.dtype) -> float:
    """Their middle; the lower one where the middle would be rounded to the other."""
    middle = float(torch.tensor(low / 2 + high / 2, dtype=dtype, device="cpu"))
    return middle if low <= middle < high else low


def _shares(
    threshold: float, scores: Tensor, errors: Tensor | None, ood_scores: Tensor | None
) -> dict[str, float | None]:
    answered = scores <= threshold
    num_answered, rows = int(answered.sum()), len(scores)
    return {
        "coverage": num_answered / rows,
        "risk": None if errors is None or num_answered == 0 else float(errors[answered].sum()) / num_answered,
        "risk_without": None if errors is None else float(errors.sum()) / rows,
        "fpr": (rows - num_answered) / rows,
        "tpr": None if ood_scores is None else int((ood_scores > threshold).sum()) / len(ood_scores),
    }


def _threshold_of_share(scores: Tensor, share: float, confidence: float | None, name: str) -> float:
    """The least of the scores that at least `share` of the rows do not exceed."""
    ordered, rows = scores.sort().values, len(scores)
    if confidence is None:
        return float(ordered[math.ceil(exact(share) * rows) - 1])
    # The k-th smallest score, with the least k for which P(Bin(rows, share) < k) >= confidence.
    least = int(np.searchsorted(bdtr(np.arange(rows), rows, share), confidence))
    if least == rows:
        needed = math.ceil(math.log1p(-confidence) / math.log(share))
        raise ValueError(
            f"{name}={share:g} cannot be guaranteed with {_percent(confidence)} confidence on {rows} rows: pass at least "
            f"{needed}, or ask for less"
        )
    return float(ordered[least])


def _threshold_of_risk(scores: Tensor, errors: Tensor, risk: float, confidence: float | None) -> float:
    """The highest of the scores up to which the mean error is at most `risk`."""
    # Among equal scores the wrong come first: the worst order, so that no test passes between them by luck.
    order = errors.argsort(descending=True, stable=True)
    order = order[scores[order].argsort(stable=True)]
    ordered, errors = scores[order], errors[order]
    is_end = torch.cat([ordered[1:] > ordered[:-1], torch.ones(1, dtype=torch.bool, device="cpu")])
    if confidence is not None:
        wrong, ends = errors.bool().numpy(), is_end.nonzero().squeeze(1).numpy() + 1  # rows that thresholds answer
        answered = _certified(wrong, ends, risk, 1 - confidence)
        if answered == 0:
            higher = (percent / 100 for percent in range(math.ceil(100 * risk), 100))
            certified = (_percent(share) for share in higher if _certified(wrong, ends, share, 1 - confidence))
            reached = next(certified, "none")
            raise ValueError(
                f"risk={risk:g} cannot be guaranteed with {_percent(confidence)} confidence on these {len(wrong)} rows, the lowest "
                f"that can be is {reached}: pass more rows, a better score, a higher risk, or a lower confidence (0 for none)"
            )
        return float(ordered[answered - 1])
    # A count over a count rounds as the target does: 5 of 100 are not above 0.05.
    risks = errors.cumsum(0) / torch.arange(1, len(errors) + 1, device="cpu")
    holding = (is_end & (risks <= risk)).nonzero()
    if len(holding) == 0:
        raise ValueError(f"no threshold keeps the risk at {risk:g}: the lowest is {float(risks[is_end].min()):.3g}")
    return float(ordered[holding[-1, 0]])


def _certified(wrong: np.ndarray, ends: np.ndarray, risk: float, chance: float) -> int:
    """How many rows may be answered so that the risk holds except with this chance; 0 if none may.

    Counts may start the walks, though the thresholds they stand for are random: let R(t) be the risk of answering all scores
    below t, ties broken at random. Between two points where R crosses the target the average risk is the target itself, so
    that given the counts at these points the errors up to any of them are binomial. The walk goes wrong only if the test
    passes there, which has the chance that the start was given.
    """
    starts = _starts(len(wrong), risk, chance)
    walks = [(start, _last_passed(wrong, start, risk, chance / len(starts))) for start in starts]
    return max(int(ends[(start < ends) & (ends <= passed)].max(initial=0)) for start, passed in walks)


def _starts(rows: int, risk: float, chance: float) -> list[int]:
    """How many rows each walk starts with; counts that cannot pass even without an error are left out.

    A walk starts strictly below an order statistic, because the rows there are independent given it.
    """
    starts = sorted({math.ceil(share * rows) - 1 for share in STARTS})
    while len(starts) > 1 and (1 - risk) ** starts[0] > chance / max(1, len(starts) - 1):
        starts = starts[1:]
    return starts if len(starts) == 1 else starts[:-1]  # the last is there for few rows


def _last_passed(wrong: np.ndarray, start: int, risk: float, chance: float) -> int:
    """The largest count up to which every test from `start` on rejects "the risk is higher"; 0 if the first does not."""
    counts, errors = np.arange(start, len(wrong) + 1), np.append(0, wrong.cumsum())[start:]
    is_rejected = bdtr(errors, counts, risk) <= chance  # P(at most so many errors) if the risk were the target
    first_kept = int(np.append(is_rejected, False).argmin())
    return start + first_kept - 1 if first_kept else 0


def check_target(target: Mapping[str, float | None], is_share: bool = True) -> tuple[str, float]:
    """The name and value of the one target given; raises an error for several, none, and values that are not shares.

    is_share: whether a risk is one; otherwise it is a mean error of any size
    """
    goals = {name: value for name, value in target.items() if value is not None} if isinstance(target, Mapping) else {}
    if len(goals) != 1 or not set(goals) <= set(TARGETS):
        raise ValueError(f"target is {goals or target!r}: pass one of {', '.join(TARGETS)}, such as {{'risk': 0.05}}")
    ((name, value),) = goals.items()
    if is_share or name != "risk":
        return name, check_share(value, name)
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < math.inf:
        raise ValueError(f"risk is {value!r}: pass the largest mean absolute error, in the unit of the labels")
    return name, float(value)


def check_share(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < value < 1:
        raise ValueError(f"{name} is {value!r}: pass a share between 0 and 1, such as 0.05 or 0.95")
    return float(value)


def exact(share: float) -> Fraction:
    """The share as it was written: 0.07 of 100 rows are exactly 7."""
    return Fraction(str(float(share)))


def _checked(scores: Any, correct: Any, ood_scores: Any, errors: Any) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The scores, the error of each and the out-of-distribution scores, in float64 on the CPU."""
    scores = as_scores(scores, "scores")
    ood_scores = None if ood_scores is None else as_scores(ood_scores, "ood_scores")
    if correct is not None:
        correct = as_tensor(correct).detach().cpu()
        if correct.shape != scores.shape or not ((correct == 0) | (correct == 1)).all():
            raise ValueError(f"correct has shape {tuple(correct.shape)}: pass True or False for each of {len(scores)}")
        errors = 1 - correct.double()
    return scores, None if errors is None else as_scores(errors, "errors"), ood_scores
