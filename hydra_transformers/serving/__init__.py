"""A model for batch engines and over HTTP, and a page in the browser to try a classifier on.

`create_app` and `run` import FastAPI, `build_page` and `launch_page` Gradio, each on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..hub.handler import RequestError
from .answers import BadRow
from .batcher import Batcher
from .jobs import Finished, predict_data
from .page_inputs import read_examples
from .predictor import HydraPredictor


if TYPE_CHECKING:
    from .page import build_page, launch_page
    from .server import create_app, run

_MODULES = {"build_page": ".page", "launch_page": ".page", "create_app": ".server", "run": ".server"}
__all__ = ["BadRow", "Batcher", "HydraPredictor", "RequestError", "build_page", "create_app"]
__all__ += ["Finished", "launch_page", "predict_data", "read_examples", "run"]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
