"""Uncertainty of an ensemble: decomposition, metrics, out-of-distribution detection, temperature scaling, abstention,
conformal prediction sets. Reports on them are in `hydra_transformers.reports`.
"""

from .abstention import Abstention
from .calibrated_classifier import CalibratedClassifier
from .calibration import Calibration, calibrate
from .conformal import ConformalSets
from .decomposition import Decomposition, NumberPrediction, decompose, predict_uncertainty
from .detectors import OOD_SCORES, Detector, detector_by_name, ood_score
from .features import AnswerReader, collect_answers
from .metrics import classification_metrics, diversity_metrics, ood_metrics
from .monitor import Monitor
from .multi_label import LabelSets, multi_label_metrics
from .raw_inputs import predict_decisions
from .regression import regression_metrics
from .rewards import best_of_n, preference_metrics
from .streaming import UncertaintyAccumulator, compute_metrics
from .task import Task
from .tasks import task_of
from .temperature import TemperatureScaling


__all__ = [
    "OOD_SCORES",
    "Abstention",
    "AnswerReader",
    "CalibratedClassifier",
    "Calibration",
    "ConformalSets",
    "Decomposition",
    "Detector",
    "LabelSets",
    "Monitor",
    "NumberPrediction",
    "Task",
    "TemperatureScaling",
    "UncertaintyAccumulator",
    "best_of_n",
    "calibrate",
    "classification_metrics",
    "collect_answers",
    "compute_metrics",
    "decompose",
    "detector_by_name",
    "diversity_metrics",
    "multi_label_metrics",
    "ood_metrics",
    "ood_score",
    "predict_decisions",
    "predict_uncertainty",
    "preference_metrics",
    "regression_metrics",
    "task_of",
]
