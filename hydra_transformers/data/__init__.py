"""From what a user has to batches: files, Hub sets, images, texts, audio, columns, labels."""

from .loading import load_data


__all__ = ["load_data"]
