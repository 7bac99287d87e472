"""From what a user has to batches: files, Hub sets, images, texts, sounds, columns, labels."""

from .raw_data import prepare


__all__ = ["prepare"]
