"""Uncertainty of an ensemble: decomposition, metrics, out-of-distribution detection, temperature scaling, abstention,
conformal prediction sets. Reports on them are in `hydra_transformers.reports`.
"""

from .abstention import Abstention
from .calibrated_classifier import CalibratedClassifier
from .calibration import calibrate
from .decomposition import decompose, predict_uncertainty
from .detectors import Detector, ood_score
from .metrics import classification_metrics, compute_metrics, ood_metrics
from .monitor import Monitor
from .raw_inputs import predict_decisions
from .temperature import TemperatureScaling


__all__ = [
    "Abstention",
    "CalibratedClassifier",
    "Detector",
    "Monitor",
    "TemperatureScaling",
    "calibrate",
    "classification_metrics",
    "compute_metrics",
    "decompose",
    "ood_metrics",
    "ood_score",
    "predict_decisions",
    "predict_uncertainty",
]
