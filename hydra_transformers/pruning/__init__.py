"""Pruning: which heads go (scores, circuits), cutting them out, and drawing diverse members."""

from ..fusion import to_transformers
from .circuits import Circuit
from .extraction import extract_circuit
from .gradient_scores import taylor_scores
from .heads import prune_heads
from .masking import ablated
from .members import draw_members
from .oba import oba_prune, oba_scores
from .scores import head_scores, lowest_heads
from .taylor import taylor_prune


__all__ = [
    "Circuit",
    "ablated",
    "draw_members",
    "extract_circuit",
    "head_scores",
    "lowest_heads",
    "oba_prune",
    "oba_scores",
    "prune_heads",
    "taylor_prune",
    "taylor_scores",
    "to_transformers",
]
