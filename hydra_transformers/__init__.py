"""Hydra Ensembles for Hugging Face Transformers.

Several checkpoints of one pre-trained transformer, or copies of a trained one with different
attention heads cut out, run fused as a single model that knows when it does not know. Importing
this package registers the Hydra models with the Auto classes of Transformers. The names a user
needs first are here; the rest is in the subpackages. All of them are imported when they are asked
for.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import models
from ._version import __version__


# By name, the subpackage that has it. A new name is a line here, and one below for type checkers.
NAMES = {
    "HydraTrainer": "training",
    "HydraTrainingArguments": "training",
    "calibrate": "uncertainty",
    "compare_fusions": "reports",
    "decompose": "uncertainty",
    "evaluate_uncertainty": "reports",
    "export": "exporting",
    "finetune": "training",
    "load_data": "data",
    "predict_uncertainty": "uncertainty",
    "prune_heads": "pruning",
}
if TYPE_CHECKING:
    from .data import load_data as load_data
    from .exporting import export as export
    from .models import *  # noqa: F403
    from .pruning import prune_heads as prune_heads
    from .reports import compare_fusions as compare_fusions
    from .reports import evaluate_uncertainty as evaluate_uncertainty
    from .training import HydraTrainer as HydraTrainer
    from .training import HydraTrainingArguments as HydraTrainingArguments
    from .training import finetune as finetune
    from .uncertainty import calibrate as calibrate
    from .uncertainty import decompose as decompose
    from .uncertainty import predict_uncertainty as predict_uncertainty

__all__ = ["__version__", *NAMES, *models.__all__]


# The command registers when it runs one of its commands: `--help` need not wait for torch.
_is_command = [Path(word).stem for word in sys.argv[:1]] == ["hydra-transformers"]
if not _is_command:
    models.register()


def __getattr__(name: str) -> Any:
    if name in NAMES:
        return getattr(importlib.import_module(f".{NAMES[name]}", __name__), name)
    if name in models.__all__:
        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
