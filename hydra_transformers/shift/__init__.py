"""Shifted data: images and texts corrupted by name in five severities."""

from .corrupted_data import corrupted, corrupted_sets
from .corruptions import CORRUPTIONS, SEVERITIES, Corruption, corrupt


__all__ = ["CORRUPTIONS", "SEVERITIES", "Corruption", "corrupt", "corrupted", "corrupted_sets"]
