"""Pruning: which heads go (Taylor scores, OBA, circuits), cutting them out, and drawing diverse members."""

from .circuits import Circuit
from .diversity import layer_divergence, overlap
from .extraction import extract_circuit
from .heads import prune_heads
from .masking import ablated
from .members import draw_members
from .oba import oba_prune, oba_scores
from .taylor import TaylorPruning, taylor_prune, taylor_scores


__all__ = [
    "Circuit",
    "TaylorPruning",
    "ablated",
    "draw_members",
    "extract_circuit",
    "layer_divergence",
    "oba_prune",
    "oba_scores",
    "overlap",
    "prune_heads",
    "taylor_prune",
    "taylor_scores",
]
