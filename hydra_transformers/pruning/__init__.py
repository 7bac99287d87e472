"""Pruning: which heads go (Taylor scores, circuits), cutting them out, and drawing diverse members."""

from .circuits import Circuit
from .diversity import head_divergence, layer_divergence, overlap
from .extraction import extract_circuit
from .head_maps import HeadMap
from .heads import prune_heads
from .members import draw_members
from .taylor import TaylorPruning, taylor_prune, taylor_scores


__all__ = [
    "Circuit",
    "HeadMap",
    "TaylorPruning",
    "draw_members",
    "extract_circuit",
    "head_divergence",
    "layer_divergence",
    "overlap",
    "prune_heads",
    "taylor_prune",
    "taylor_scores",
]
