"""Analyses of a trained model's heads (sections 3, B.1 to B.3 and C.3 of the paper), each with a small result that has tables
and pictures: Proposition 1, what heads see, who is pruned, how many can go."""

from .comparison import HeadSetComparison, compare_head_sets
from .head_sets import random_order
from .proposition import PruningUnderNoise, pruning_under_noise
from .separation import HeadSeparation, head_separation
from .sweep import BudgetSweep, sweep_budgets
from .towers import HeadScores


__all__ = [
    "BudgetSweep",
    "HeadScores",
    "HeadSeparation",
    "HeadSetComparison",
    "PruningUnderNoise",
    "compare_head_sets",
    "head_separation",
    "pruning_under_noise",
    "random_order",
    "sweep_budgets",
]
