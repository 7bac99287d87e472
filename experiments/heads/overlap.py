"""Which heads are pruned (B.2, question 2): what head sets have in common, and what chance would give."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from hydra_transformers.pruning.heads import Head
from hydra_transformers.reports.table import markdown_table


@dataclass(frozen=True)
class Pair:
    """What two head sets have in common. `..._by_chance` is the mean over random sets of the same sizes.

    sizes: how many heads each has
    common: how many both have
    overlap: |A ∩ B| / |A ∪ B|
    head_divergence, layer_divergence: `divergence` of the heads, and of how they spread over the layers
    p_value: the probability that random sets have as many in common, or more
    """

    sizes: tuple[int, int]
    common: int
    common_by_chance: float
    overlap: float
    overlap_by_chance: float
    head_divergence: float
    layer_divergence: float
    p_value: float


@dataclass(frozen=True)
class HeadSetComparison:
    """
    head_sets: name -> the pruned heads; heads: all of the model's
    pairs: (name, name) -> `Pair`
    """

    head_sets: dict[str, list[Head]]
    heads: list[Head]
    pairs: dict[tuple[str, str], Pair]

    def tables(self) -> dict[str, str]:
        """How many heads each set has in each layer, and what each two have in common, with chance levels in brackets."""
        layers = sorted({layer for layer, _ in self.heads})
        by_layer = []
        for name, heads in self.head_sets.items():
            counts = Counter(layer for layer, _ in heads)
            by_layer.append([name, str(len(heads)), *(str(counts[layer]) for layer in layers)])
        heading = ["One", "Other", "Heads", "In common", "p"]
        heading += ["Overlap", "JSD of heads", "JSD of layers"]
        rows = []
        for names, pair in self.pairs.items():
            common = f"{pair.common} ({pair.common_by_chance:.1f})"
            row = [*names, "{}, {}".format(*pair.sizes), common, f"{pair.p_value:.2g}"]
            row.append(f"{pair.overlap:.2f} ({pair.overlap_by_chance:.2f})")
            rows.append([*row, f"{pair.head_divergence:.2f}", f"{pair.layer_divergence:.2f}"])
        return {
            f"Pruned heads, of {len(self.heads)}, by layer": markdown_table(
                ["Heads cut out", "Number", *map(str, layers)], by_layer
            ),
            "In common (by chance)": markdown_table(heading, rows),
        }


def compare_head_sets(heads: Sequence[Head], head_sets: Mapping[str, Sequence[Head]]) -> HeadSetComparison:
    """What head sets of one model, whose `heads` are all of its heads, have in common."""
    sets = {name: [head for head in heads if head in set(chosen)] for name, chosen in head_sets.items()}
    return HeadSetComparison(
        sets, list(heads), {(a, b): compared(heads, sets[a], sets[b]) for a, b in combinations(sets, 2)}
    )


def compared(heads: Sequence[Head], a: Sequence[Head], b: Sequence[Head]) -> Pair:
    sizes = (len(a), len(b))
    both = len(set(a) & set(b))
    likely = list(commons(len(heads), *sizes))
    return Pair(
        sizes=sizes,
        common=both,
        common_by_chance=len(a) * len(b) / len(heads),
        overlap=both / len({*a, *b}),
        overlap_by_chance=sum(p * common / (sum(sizes) - common) for common, p in likely),
        head_divergence=divergence(a, b),
        layer_divergence=divergence([head[:-1] for head in a], [head[:-1] for head in b]),
        p_value=min(1.0, sum(p for common, p in likely if common >= both)),
    )


def commons(heads: int, a: int, b: int) -> Iterator[tuple[int, float]]:
    """Each number of common heads that random sets of `a` and `b` heads can have, and its probability."""
    for common in range(max(0, a + b - heads), min(a, b) + 1):
        yield common, math.comb(a, common) * math.comb(heads - a, b - common) / math.comb(heads, b)


def divergence(a: Sequence[tuple], b: Sequence[tuple]) -> float:
    """Jensen–Shannon divergence, in nats, of the shares of each place in `a` and in `b`: 0 for equal ones, ln 2 where they have
    nothing in common."""
    p, q = ({place: count / len(places) for place, count in Counter(places).items()} for places in (a, b))
    mean = {place: (p.get(place, 0.0) + q.get(place, 0.0)) / 2 for place in p | q}
    return sum(share * math.log(share / mean[place]) / 2 for shares in (p, q) for place, share in shares.items())
