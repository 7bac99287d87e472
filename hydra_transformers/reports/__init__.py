"""Reports: tables, plots, the uncertainty report and the fusion report."""

from .evaluation import evaluate_uncertainty
from .fusion_report import FusionReport, fusion_report
from .gains import Gain, gain_sentence, gains
from .report import ModelResult, UncertaintyReport
from .report_tables import cost_table
from .table import Cell, Table
from .task_report import TaskReport, TaskResult


__all__ = [
    "Cell",
    "FusionReport",
    "Gain",
    "ModelResult",
    "Table",
    "TaskReport",
    "TaskResult",
    "UncertaintyReport",
    "cost_table",
    "evaluate_uncertainty",
    "fusion_report",
    "gain_sentence",
    "gains",
]
