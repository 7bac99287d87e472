"""Which heads are pruned (B.2, question 2): what head sets have in common, and what chance would give."""

import math
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from hydra_transformers.pruning import HeadMap, head_divergence, layer_divergence, overlap, prune_heads
from hydra_transformers.pruning.heads import Head, as_heads_to_prune, heads_of
from hydra_transformers.reports.table import markdown_table

from .arguments import as_head_sets


DRAWS = 500  # of random sets, for the chance level that has no formula


@dataclass(frozen=True)
class Pair:
    """What two head sets have in common. `..._by_chance` is the mean over random sets of the same sizes.

    sizes: how many heads each has
    common: how many both have
    within_layers: the mean of `common` if each layer's heads were drawn at random, as many as each set has there
    overlap: |A ∩ B| / |A ∪ B|
    head_divergence, layer_divergence: see `hydra_transformers.pruning`, in nats
    p_value: the probability that random sets have as many in common, or more
    """

    sizes: tuple[int, int]
    common: int
    common_by_chance: float
    within_layers: float
    overlap: float
    overlap_by_chance: float
    head_divergence: float
    head_divergence_by_chance: float
    layer_divergence: float
    layer_divergence_by_chance: float
    p_value: float


@dataclass(frozen=True)
class HeadSetComparison:
    """The result of `compare_head_sets`.

    head_sets: name -> the pruned heads; heads: all of the model's
    pairs: (name, name) -> `Pair`
    """

    head_sets: dict[str, list[Head]]
    heads: list[Head]
    pairs: dict[tuple[str, str], Pair]

    def to_dict(self) -> dict[str, Any]:
        return {
            "heads": len(self.heads),
            "head_sets": self.head_sets,
            "pairs": [{"sets": list(names), **asdict(pair)} for names, pair in self.pairs.items()],
        }

    def to_markdown(self) -> str:
        """How many heads each set has in each layer, and what each two have in common, with chance levels in brackets."""
        parts = [f"### Pruned heads, of {len(self.heads)}, by layer", self._layer_table()]
        if self.pairs:
            parts += ["### In common (by chance)", self._pair_table()]
        return "\n\n".join(parts) + "\n"

    def _layer_table(self) -> str:
        layers = list(dict.fromkeys(head[:-1] for head in self.heads))
        rows = []
        for name, heads in self.head_sets.items():
            counts = Counter(head[:-1] for head in heads)
            rows.append([name, str(len(heads)), *(str(counts[layer]) for layer in layers)])
        return markdown_table(["Heads cut out", "Number", *(" ".join(map(str, layer)) for layer in layers)], rows)

    def _pair_table(self) -> str:
        heading = ["One", "Other", "Heads", "In common", "by chance in these layers", "p"]
        heading += ["Overlap", "JSD of heads", "JSD of layers"]
        rows = []
        for names, pair in self.pairs.items():
            common = f"{pair.common} ({pair.common_by_chance:.1f})"
            row = [*names, "{}, {}".format(*pair.sizes), common, f"{pair.within_layers:.1f}", f"{pair.p_value:.2g}"]
            for measure in ("overlap", "head_divergence", "layer_divergence"):
                row.append(f"{getattr(pair, measure):.2f} ({getattr(pair, f'{measure}_by_chance'):.2f})")
            rows.append(row)
        return markdown_table(heading, rows)

    def head_map(self) -> HeadMap:
        """Kept heads dark, pruned ones light."""
        kept = {
            name: {head: float(head not in pruned) for head in self.heads} for name, pruned in self.head_sets.items()
        }
        return HeadMap(kept, low=0, high=1)

    def _repr_html_(self) -> str:
        return self.head_map()._repr_html_()

    def plot(self, folder: str | Path) -> list[Path]:
        """Writes `kept_heads.png` (for CLIP one for each tower) and `overlaps.png`, and returns their paths."""
        from .head_plots import draw_comparison

        return draw_comparison(self, folder)


def compare_head_sets(model: PreTrainedModel, head_sets: Mapping[str, Any], *, seed: int = 0) -> HeadSetComparison:
    """What head sets of one model have in common: those of Taylor pruning, circuits, objectives or seeds.

    model: the model of the heads, or one of its architecture
    head_sets: name -> the heads to cut out: a `Circuit` (all that it ranks; `circuit.first(12)` for some), a `TaylorPruning`,
        heads as `prune_heads` takes them, or a list of heads
    seed: for random sets, which chance levels of layers come from
    """
    heads = heads_of(prune_heads(model))
    sets = as_head_sets(head_sets, "head_sets", heads)
    chance = Chance(heads, seed)
    pairs = {(a, b): chance.pair(sets[a], sets[b]) for a, b in combinations(sets, 2)}
    return HeadSetComparison(sets, heads, pairs)


class Chance:
    """What random sets of a model's heads have in common."""

    def __init__(self, heads: Sequence[Head], seed: int):
        self.heads, self.seed = heads, seed
        self.layer_divergence = cache(self._layer_divergence)

    def pair(self, a: Sequence[Head], b: Sequence[Head]) -> Pair:
        sizes, both = (len(a), len(b)), len(set(a) & set(b))
        likely = list(self.commons(*sizes))
        of_layer, in_a, in_b = (Counter(head[:-1] for head in some) for some in (self.heads, a, b))
        prune_a, prune_b = as_heads_to_prune(a), as_heads_to_prune(b)
        return Pair(
            sizes=sizes,
            common=both,
            common_by_chance=len(a) * len(b) / len(self.heads),
            within_layers=sum(in_a[layer] * in_b[layer] / count for layer, count in of_layer.items()),
            overlap=overlap(prune_a, prune_b),
            overlap_by_chance=sum(p * common / (sum(sizes) - common) for common, p in likely),
            head_divergence=head_divergence(prune_a, prune_b),
            head_divergence_by_chance=sum(p * self._head_divergence(*sizes, common) for common, p in likely),
            layer_divergence=layer_divergence(prune_a, prune_b),
            layer_divergence_by_chance=self.layer_divergence(*sorted(sizes)),
            p_value=min(1.0, sum(p for common, p in likely if common >= both)),
        )

    def commons(self, a: int, b: int) -> Iterator[tuple[int, float]]:
        """Each number of common heads that random sets of `a` and `b` heads can have, and its probability."""
        everything = len(self.heads)
        for common in range(max(0, a + b - everything), min(a, b) + 1):
            yield common, math.comb(a, common) * math.comb(everything - a, b - common) / math.comb(everything, b)

    def _head_divergence(self, a: int, b: int, common: int) -> float:
        together = (1 / a + 1 / b) / 2
        shared = common * (math.log(1 / a / together) / a + math.log(1 / b / together) / b)
        return (shared + math.log(2) * ((a - common) / a + (b - common) / b)) / 2

    def _layer_divergence(self, a: int, b: int) -> float:
        draw = random.Random(self.seed)
        sets = ([as_heads_to_prune(draw.sample(self.heads, size)) for size in (a, b)] for _ in range(DRAWS))
        return sum(layer_divergence(*pair) for pair in sets) / DRAWS
