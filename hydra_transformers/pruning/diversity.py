"""How different two head sets are, at a glance."""

import math
from collections import Counter
from collections.abc import Iterable

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
    return _divergence(
        *(_shares((head[:-1] for head in as_heads(each)), name) for name, each in _named(heads_a, heads_b))
    )


def head_divergence(heads_a: dict, heads_b: dict) -> float:
    """Jensen–Shannon divergence, in nats, of two head sets, each head of a set counting the same.

    Of sets of equal size that have the share f in common it is (1 - f) ln 2, so it says the same as `overlap`; which layers
    they are in does not matter, as it does for `layer_divergence`.

    >>> round(head_divergence({0: [1, 2]}, {0: [2], 3: [0]}), 4)
    0.3466
    """
    return _divergence(*(_shares(as_heads(each), name) for name, each in _named(heads_a, heads_b)))


def _named(heads_a: dict, heads_b: dict) -> list[tuple[str, dict]]:
    return [("heads_a", heads_a), ("heads_b", heads_b)]


def _divergence(p: dict[tuple, float], q: dict[tuple, float]) -> float:
    mean = {place: (p.get(place, 0.0) + q.get(place, 0.0)) / 2 for place in p | q}
    return sum(
        share * math.log(share / mean[place]) / 2 for distribution in (p, q) for place, share in distribution.items()
    )


def _shares(places: Iterable[tuple], name: str) -> dict[tuple, float]:
    counts = Counter(places)
    if not counts:
        raise ValueError(f"{name} names no head: a set without heads has no spread")
    return {place: count / counts.total() for place, count in counts.items()}
