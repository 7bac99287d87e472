"""Uncertainty of an ensemble: decomposition, metrics, out-of-distribution detection, temperature scaling, abstention,
conformal prediction sets. Mathematics only: reports are made in `hydra_transformers.reports`.
"""

from importlib import import_module
from typing import Any

from .abstention import Abstention
from .answers import predict_decisions
from .calibrated_classifier import CalibratedClassifier
from .calibration import Calibration, calibrate
from .conformal import ConformalSets
from .decomposition import Decomposition, decompose, predict_uncertainty
from .detectors import Detector, detector_by_name
from .features import AnswerReader, collect_answers
from .metrics import classification_metrics, diversity_metrics, ood_metrics
from .ood import OOD_SCORES, ood_score
from .streaming import UncertaintyAccumulator
from .temperature import TemperatureScaling
from .trainer import StreamingComputeMetrics, compute_metrics


__all__ = [
    "OOD_SCORES",
    "Abstention",
    "AnswerReader",
    "CalibratedClassifier",
    "Calibration",
    "ConformalSets",
    "Decomposition",
    "Detector",
    "StreamingComputeMetrics",
    "TemperatureScaling",
    "UncertaintyAccumulator",
    "calibrate",
    "classification_metrics",
    "collect_answers",
    "compute_metrics",
    "decompose",
    "detector_by_name",
    "diversity_metrics",
    "ood_metrics",
    "ood_score",
    "predict_decisions",
    "predict_uncertainty",
]

# Part of this package's public names; they live one floor up, where reports are made.
_REPORTS = ("FusionReport", "ModelResult", "UncertaintyReport", "evaluate_uncertainty", "fusion_report")


def __getattr__(name: str) -> Any:
    if name in _REPORTS:
        return getattr(import_module("hydra_transformers.reports"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
