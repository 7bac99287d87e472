"""Reports: one `Report` for all tasks, and the comparison of ways to fuse members."""

from .evaluation import evaluate_uncertainty
from .fusions import compare_fusions
from .report import Report
from .table import cost_table


__all__ = ["Report", "compare_fusions", "cost_table", "evaluate_uncertainty"]
