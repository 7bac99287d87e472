"""A model over HTTP: JSON in, answers with their uncertainty out."""

from .app import create_app
from .batching import Batcher


__all__ = ["Batcher", "create_app"]
