"""Shifted data: images and texts corrupted by name in five severities."""

from .corrupted_data import corrupted, corrupted_sets
from .corruptions import corrupt


__all__ = ["corrupt", "corrupted", "corrupted_sets"]
