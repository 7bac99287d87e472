"""Uncertainty of an ensemble: decomposition, metrics, out-of-distribution detection, temperature scaling, abstention,
conformal prediction sets and reports.

`fusion_report` tells whether members may be fused."""

from .abstention import Abstention
from .answers import predict_decisions
from .calibration import Calibration, DecidingClassifier, calibrate
from .conformal import ConformalSets
from .decomposition import Decomposition, decompose, predict_uncertainty
from .detectors import Detector, detector_by_name
from .evaluation import evaluate_uncertainty
from .features import AnswerReader, collect_answers
from .fusion_report import FusionReport, fusion_report
from .metrics import classification_metrics, diversity_metrics, ood_metrics
from .ood import OOD_SCORES, ood_score
from .report import ModelResult, UncertaintyReport
from .streaming import UncertaintyAccumulator
from .temperature import TemperatureScaling
from .trainer import StreamingComputeMetrics, compute_metrics


__all__ = [
    "OOD_SCORES",
    "Abstention",
    "AnswerReader",
    "Calibration",
    "ConformalSets",
    "DecidingClassifier",
    "Decomposition",
    "Detector",
    "FusionReport",
    "ModelResult",
    "StreamingComputeMetrics",
    "TemperatureScaling",
    "UncertaintyAccumulator",
    "UncertaintyReport",
    "calibrate",
    "classification_metrics",
    "collect_answers",
    "compute_metrics",
    "decompose",
    "detector_by_name",
    "diversity_metrics",
    "evaluate_uncertainty",
    "fusion_report",
    "ood_metrics",
    "ood_score",
    "predict_decisions",
    "predict_uncertainty",
]
