"""A page in the browser to try a classifier on: `hydra-transformers app MODEL`, or `launch_page` in Python.

Needs Gradio, which is imported when a page is made.
"""

from typing import TYPE_CHECKING, Any

from .answering import Answer, AskedModel
from .examples import read_examples
from .inputs import InputError, Limits


if TYPE_CHECKING:
    from .page import build_page, launch_page


__all__ = ["Answer", "AskedModel", "InputError", "Limits", "build_page", "launch_page", "read_examples"]


def __getattr__(name: str) -> Any:
    """What is made of Gradio comes when it is asked for."""
    if name in ("build_page", "launch_page"):
        from . import page

        return getattr(page, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
