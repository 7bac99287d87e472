"""Hydra Ensembles for Hugging Face Transformers.

Several fine-tunings of one pre-trained transformer, or copies of a trained one with different attention heads cut out, run
fused as a single model that knows when it does not know. The subpackages: `pruning`, `training`, `uncertainty`, `baselines`, `analysis`,
`hub`, and `hydration`, whose `hydrate` does everything in one call.
"""

from typing import Any

from .models import *  # noqa: F403
from .models import __all__ as of_models
from .raw_data import prepare


__all__ = [*of_models, "prepare"]


__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`hydrate` and what it returns, and `export`, come when they are asked for: they need most other subpackages."""
    if name in ("hydrate", "Hydrated"):
        from . import hydration

        return getattr(hydration, name)
    if name == "export":
        from .formats import export

        return export
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
