"""A model for batch engines and over HTTP, and a page in the browser to try a classifier on.

`create_app` and `run` import FastAPI, `launch_page` Gradio, each on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .cascade import Cascade
from .jobs import predict_data
from .predictor import HydraPredictor


if TYPE_CHECKING:
    from .page import launch_page
    from .server import create_app, run

_MODULES = {"launch_page": ".page", "create_app": ".server", "run": ".server"}
__all__ = ["Cascade", "HydraPredictor", "create_app", "launch_page", "predict_data", "run"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
