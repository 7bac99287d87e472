"""A model over HTTP, and a page in the browser to try a classifier on.

`create_app` and `run` need FastAPI, `build_page` and `launch_page` Gradio; each is imported when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from .answering import ModelAnswerer
from .app import create_app
from .batching import Batcher
from .page_answers import AskedModel
from .page_examples import read_examples
from .page_inputs import InputError, Limits
from .running import run


if TYPE_CHECKING:
    from .page import build_page, launch_page


__all__ = [
    "AskedModel",
    "Batcher",
    "InputError",
    "Limits",
    "ModelAnswerer",
    "build_page",
    "create_app",
    "launch_page",
    "read_examples",
    "run",
]


def __getattr__(name: str) -> Any:
    if name in ("build_page", "launch_page"):
        from . import page

        return getattr(page, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
