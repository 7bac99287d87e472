"""A model over HTTP: JSON in, answers with their uncertainty out."""

from .answering import ModelAnswerer
from .app import create_app
from .batching import Batcher
from .running import run


__all__ = ["Batcher", "ModelAnswerer", "create_app", "run"]
