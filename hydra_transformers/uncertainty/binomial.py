"""Exact binomial probabilities, without SciPy: what finite-sample guarantees are made of."""

import math

import torch


def binomial_pmf(successes: int, trials: int, p: float) -> float:
    """P(Bin(trials, p) = successes), 0 < p < 1."""
    ways = math.lgamma(trials + 1) - math.lgamma(successes + 1) - math.lgamma(trials - successes + 1)
    return math.exp(ways + successes * math.log(p) + (trials - successes) * math.log1p(-p))


def binomial_cdf(successes: int, trials: int, p: float) -> float:
    """P(Bin(trials, p) <= successes), 0 < p < 1.

    Example:
        >>> round(binomial_cdf(1, 3, 0.5), 12)
        0.5
    """
    if successes < 0:
        return 0.0
    if successes >= trials:
        return 1.0
    counts = torch.arange(successes + 1, dtype=torch.float64, device="cpu")
    ways = math.lgamma(trials + 1) - torch.lgamma(counts + 1) - torch.lgamma(trials - counts + 1)
    return min(1.0, float((ways + counts * math.log(p) + (trials - counts) * math.log1p(-p)).exp().sum()))
