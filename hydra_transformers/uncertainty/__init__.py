"""Uncertainty of an ensemble: decomposition, metrics, out-of-distribution detection, temperature scaling, abstention,
conformal prediction sets. Reports on them are in `hydra_transformers.reports`.
"""

from .abstention import Abstention
from .calibrated_classifier import CalibratedClassifier
from .calibration import Calibration, calibrate
from .decomposition import Decomposition, decompose, predict_uncertainty
from .detectors import Detector, ood_score
from .metrics import classification_metrics, compute_metrics, ood_metrics
from .monitor import Monitor
from .multi_label import multi_label_metrics
from .raw_inputs import predict_decisions
from .regression import regression_metrics
from .rewards import preference_metrics
from .task import Task
from .tasks import task_of
from .temperature import TemperatureScaling


__all__ = [
    "Abstention",
    "CalibratedClassifier",
    "Calibration",
    "Decomposition",
    "Detector",
    "Monitor",
    "Task",
    "TemperatureScaling",
    "calibrate",
    "classification_metrics",
    "compute_metrics",
    "decompose",
    "multi_label_metrics",
    "ood_metrics",
    "ood_score",
    "predict_decisions",
    "predict_uncertainty",
    "preference_metrics",
    "regression_metrics",
    "task_of",
]
