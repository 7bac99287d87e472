"""From what a user has to batches: files, Hub sets, images, texts, audio, columns, labels."""

from .loading import PreparedData, load_data


__all__ = ["PreparedData", "load_data"]
