"""Hydra Ensembles for Hugging Face Transformers.

Several fine-tunings of one pre-trained transformer, or copies of a trained one with different attention heads cut out, run
fused as a single model that knows when it does not know. Importing this package registers the Hydra models with the Auto
classes of Transformers. The names a user needs first are here; the rest is in the subpackages.
"""

from . import fast, models, shift  # noqa: F401  models run fast, evaluate_uncertainty takes corruptions by name
from ._version import __version__
from .data import load_data
from .export import export
from .models import *  # noqa: F403
from .pruning import prune_heads
from .reports import evaluate_uncertainty, fusion_report
from .uncertainty import calibrate, decompose, predict_uncertainty


__all__ = [
    "__version__",
    "calibrate",
    "decompose",
    "evaluate_uncertainty",
    "export",
    "fusion_report",
    "load_data",
    "predict_uncertainty",
    "prune_heads",
]
__all__ += models.__all__
