"""Pruning: which heads go (scores, circuits), cutting them out, and drawing diverse members."""

from ..fusion import to_transformers
from .circuits import Circuit
from .extraction import extract_circuit
from .gradient_scores import taylor_scores
from .head_maps import HeadMap
from .heads import head_divergence, layer_divergence, overlap, prune_heads, prune_neurons
from .masking import ablated
from .member_plan import MemberPlan
from .members import draw_members
from .oba import oba_prune, oba_scores
from .old_checkpoints import load_pruned
from .scores import HEAD_SCORES, NEURON_SCORES, head_scores, lowest_heads, lowest_neurons, neuron_scores
from .taylor import TaylorPruning, taylor_prune


__all__ = [
    "HEAD_SCORES",
    "NEURON_SCORES",
    "Circuit",
    "HeadMap",
    "MemberPlan",
    "TaylorPruning",
    "ablated",
    "draw_members",
    "extract_circuit",
    "head_divergence",
    "head_scores",
    "layer_divergence",
    "load_pruned",
    "lowest_heads",
    "lowest_neurons",
    "neuron_scores",
    "oba_prune",
    "oba_scores",
    "overlap",
    "prune_heads",
    "prune_neurons",
    "taylor_prune",
    "taylor_scores",
    "to_transformers",
]
