"""A circuit: the heads of a model in the order in which they can go."""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from .._io.files import parse_json, write_atomically
from .head_maps import HeadMap
from .heads import Head, as_heads_to_prune, check_count, head_at
from .objectives import METRIC, OBJECTIVES


MODES = ("exact", "shortlist")
LAST_DIGITS = 1e-12  # that a difference of scores may be off by: 0.8 - 0.7 is more than 0.1


@dataclass
class Circuit:
    """Heads in the order in which they were removed, and what the model scored without them.

    ranking: the heads, least useful first
    scores: the score after each removal
    dense_score: the score before the first
    objective: "acc", "ood" or "avg", or "metric" for one of the user's own (`made_from["metric"]` is its name)
    mode: "exact", or "shortlist" where most choices were made among a short list of candidates
    made_from: the model, the data and the settings, with fingerprints
    checks: for "shortlist", (removal, whether the short list held the exact choice), where that was checked
    chance_from: the first removal (counted from 1) at which no candidate scored better than chance, or None
    tied: how many candidates had the score of each removal, of which a margin chose one (`made_from["ties_by"]`); None for
        circuits of earlier versions, which took the first in order
    """

    ranking: list[Head]
    scores: list[float]
    dense_score: float
    objective: str
    mode: str = "exact"
    made_from: dict[str, Any] = field(default_factory=dict)
    checks: list[tuple[int, bool]] = field(default_factory=list)
    chance_from: int | None = None
    tied: list[int] | None = None

    def heads_to_prune(self, budget: int | None = None) -> dict:
        """The first `budget` heads (by default all) as `prune_heads` takes them."""
        return as_heads_to_prune(self.first(len(self.ranking) if budget is None else budget).ranking)

    def first(self, budget: int) -> "Circuit":
        """The circuit after `budget` removals."""
        check_count(budget, "budget", 0, len(self.ranking), f"this circuit ranks {len(self.ranking)} heads")
        return replace(
            self,
            ranking=self.ranking[:budget],
            scores=self.scores[:budget],
            checks=[check for check in self.checks if check[0] <= budget],
            chance_from=self.chance_from if self.chance_from is not None and self.chance_from <= budget else None,
            tied=None if self.tied is None else self.tied[:budget],
        )

    @property
    def best_budget(self) -> int:
        """After how many removals the score is best, the more of them the better where several are; 0 where the model
        never does as well as with all its heads."""
        scores = [self.dense_score, *self.scores]
        return max(range(len(scores)), key=lambda removed: (scores[removed], removed))

    def largest_budget(self, tolerance: float = 0.0) -> int:
        """After how many removals at most the score is within `tolerance` of the best; `best_budget` where it is 0."""
        if not isinstance(tolerance, (int, float)) or not tolerance >= 0:
            raise ValueError(f"tolerance is {tolerance!r}: pass how much of the score may be lost, such as 0.01")
        scores = [self.dense_score, *self.scores]
        best = max(scores)
        return max(removed for removed, score in enumerate(scores) if best - score <= tolerance + LAST_DIGITS)

    def plot(self, path: str | os.PathLike) -> Path:
        """Draws the score after each removal, and where it is best, as a PNG file; returns its path."""
        from .plots import draw_circuit

        return draw_circuit(self, path)

    def head_map(self) -> HeadMap:
        """When each head goes, the darker the later; heads that are not ranked are darkest."""
        last = len(self.ranking) + 1
        removals = {head: removal for removal, head in enumerate(self.ranking, start=1)}
        marks = {head: str(removal) for head, removal in removals.items()}
        title = f"{self.objective}: order of {len(self.ranking)} removals"
        everything = {head: removals.get(head, last) for head in [*self._heads(), *self.ranking]}
        return HeadMap({title: everything}, low=0, high=last, marks={title: marks})

    def _heads(self) -> list[Head]:
        """Those of the model, where it is known."""
        kept = self.made_from.get("kept_heads") or {}
        towers = kept if isinstance(kept, dict) else {"": kept}
        return [
            head_at(tower, layer, head)
            for tower, layers in towers.items()
            for layer, members in enumerate(layers)
            for head in members[0]
        ]

    def _repr_html_(self) -> str:
        best = max([self.dense_score, *self.scores])
        text = f"{self.dense_score:.3f} with all heads, {best:.3f} without the first {self.best_budget}"
        return f"{self.head_map()._repr_html_()}<p>Score: {text}.</p>"

    @property
    def agreement(self) -> float | None:
        """Share of the checked removals at which the short list held the exact choice; None where none was checked."""
        return sum(agreed for _, agreed in self.checks) / len(self.checks) if self.checks else None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> "Circuit":
        """What `to_dict` gave, as a circuit; a ValueError says what is wrong with anything else."""
        try:
            fields = {"checks": [], **fields}
            for name in ("ranking", "checks"):
                fields[name] = [tuple(entry) for entry in fields[name]]
            circuit = cls(**fields)
            flaw = circuit._flaw()
        except (KeyError, TypeError) as error:
            raise ValueError(f"its fields are others, {error}") from error
        if flaw is not None:
            raise ValueError(flaw)
        return circuit

    def _flaw(self) -> str | None:
        """The first field that is not what it says."""
        heads = len(self.ranking)
        if not all(map(_is_head, self.ranking)) or len({len(head) for head in self.ranking}) > 1:
            return "its ranking has an entry that is no head"
        if len(set(self.ranking)) < heads:
            return "its ranking has a head twice"
        if len(self.scores) != heads or not all(map(_is_number, [*self.scores, self.dense_score])):
            return f"its scores are not one number for each of its {heads} heads and one for all of them"
        if self.tied is not None and (len(self.tied) != heads or not all(map(_is_count, self.tied))):
            return f"its tied is not one count for each of its {heads} heads"
        if self.objective not in (*OBJECTIVES, METRIC) or self.mode not in MODES:
            return f"its objective is {self.objective!r}, its mode {self.mode!r}"
        if not all(_is_count(removal) and isinstance(agreed, bool) for removal, agreed in self.checks):
            return "its checks are not pairs of a removal and whether it agreed"
        if not isinstance(self.made_from, dict) or not (self.chance_from is None or _is_count(self.chance_from)):
            return f"its made_from is a {type(self.made_from).__name__}, its chance_from {self.chance_from!r}"
        return None

    def save(self, path: str | os.PathLike) -> None:
        """Writes the circuit as JSON, whole or not at all."""
        write_atomically(path, json.dumps(self.to_dict(), indent=1))

    @classmethod
    def load(cls, path: str | os.PathLike) -> "Circuit":
        try:
            return cls.from_dict(parse_json(Path(path).read_bytes()))
        except ValueError as error:
            raise ValueError(f"{path} is no circuit ({error}): pass a file that Circuit.save wrote") from error


def _is_head(head: tuple) -> bool:
    return head[:-2] in ((), ("vision",), ("text",)) and len(head) > 1 and all(map(_is_count, head[-2:]))


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _is_number(number: Any) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
