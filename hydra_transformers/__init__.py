"""Hydra Ensembles for Hugging Face Transformers.

Take one trained transformer, cut different attention heads out of several copies, and run the copies fused as a single
model that knows when it does not know. The subpackages: `pruning`, `training`, `uncertainty`, `baselines`, `hub`.
"""

from .models import *  # noqa: F403
from .models import __all__ as of_models
from .raw_data import prepare


__all__ = [*of_models, "prepare"]


__version__ = "0.1.0"
