"""Studies of a trained model's heads (sections 3, B.1 to B.3 and C.3 of the paper): pruning under noise, what heads separate,
which heads are pruned, and how many. Each result has tables and plots."""

from .arguments import random_order
from .comparison import HeadSetComparison, compare_head_sets
from .head_report import HeadReport, analyse_heads
from .head_scores import HeadScores
from .noise import with_noise
from .proposition import PruningUnderNoise, pruning_under_noise
from .separation import HeadSeparation, head_separation
from .sweep import BudgetSweep, sweep_budgets


__all__ = [
    "BudgetSweep",
    "HeadReport",
    "HeadScores",
    "HeadSeparation",
    "HeadSetComparison",
    "PruningUnderNoise",
    "analyse_heads",
    "compare_head_sets",
    "head_separation",
    "pruning_under_noise",
    "random_order",
    "sweep_budgets",
    "with_noise",
]
