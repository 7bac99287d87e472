"""Shifted data: images and texts corrupted by name in five severities, and standard test sets."""

from .corrupted_data import corrupted, corrupted_sets
from .corruptions import corrupt
from .standard_sets import load_corrupted_sets


__all__ = ["corrupt", "corrupted", "corrupted_sets", "load_corrupted_sets"]
