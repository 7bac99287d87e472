"""How different two head sets are, at a glance."""

import math
from collections import Counter

from .heads import as_heads


def overlap(heads_a: dict, heads_b: dict) -> float:
    """Heads that two head sets have in common, as a share of those in either: |A ∩ B| / |A ∪ B|.

    heads_a, heads_b: `{layer: [heads]}`, for CLIP by tower. Two empty sets overlap by 1.

    >>> overlap({0: [1, 2]}, {0: [2], 3: [0]})
    0.3333333333333333
    """
    a, b = set(as_heads(heads_a)), set(as_heads(heads_b))
    return len(a & b) / len(a | b) if a | b else 1.0


def layer_divergence(heads_a: dict, heads_b: dict) -> float:
    """Jensen–Shannon divergence, in nats, of how two head sets spread over the layers.

    With p and q the shares of a set's heads per layer and m their mean: ½ KL(p ‖ m) + ½ KL(q ‖ m). From 0 (the same
    number of heads in each layer, whichever heads) to ln 2 = 0.693 (no layer in common).

    heads_a, heads_b: `{layer: [heads]}`, for CLIP by tower, whose layers then count as different ones.

    >>> layer_divergence({0: [1]}, {0: [3]}), round(layer_divergence({0: [1]}, {5: [1]}), 4)
    (0.0, 0.6931)
    """
    p, q = _layer_shares(heads_a, "heads_a"), _layer_shares(heads_b, "heads_b")
    mean = {layer: (p.get(layer, 0.0) + q.get(layer, 0.0)) / 2 for layer in p | q}
    return sum(
        share * math.log(share / mean[layer]) / 2 for distribution in (p, q) for layer, share in distribution.items()
    )


def _layer_shares(heads_to_prune: dict, name: str) -> dict[tuple, float]:
    counts = Counter(head[:-1] for head in as_heads(heads_to_prune))
    if not counts:
        raise ValueError(f"{name} names no head: a set without heads has no spread over the layers")
    return {layer: count / counts.total() for layer, count in counts.items()}
