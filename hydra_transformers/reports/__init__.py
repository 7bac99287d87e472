"""Reports: tables, plots, the uncertainty report and the fusion report."""

from .evaluation import evaluate_uncertainty
from .fusion_report import FusionReport, fusion_report
from .report import ModelResult, UncertaintyReport


__all__ = ["FusionReport", "ModelResult", "UncertaintyReport", "evaluate_uncertainty", "fusion_report"]
