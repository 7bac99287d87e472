"""Shifted data: images and texts corrupted by name in five severities, and the standard corrupted sets."""

from .corrupted_data import corrupted, corrupted_sets
from .corruptions import CORRUPTIONS, GROUPS, SEVERITIES, Corruption, corrupt, corruption_table
from .standard_sets import STANDARD_SETS, load_standard_set


__all__ = [
    "CORRUPTIONS",
    "GROUPS",
    "SEVERITIES",
    "STANDARD_SETS",
    "Corruption",
    "corrupt",
    "corrupted",
    "corrupted_sets",
    "corruption_table",
    "load_standard_set",
]
